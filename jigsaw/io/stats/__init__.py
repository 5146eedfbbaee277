"""Statistics of channels: streamed, and merged exactly."""
