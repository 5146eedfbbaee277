"""Where jigsaw reaches into torch: its methods, checkpoints and comparisons."""
