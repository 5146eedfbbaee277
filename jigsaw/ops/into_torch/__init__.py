"""Methods of tensors, checkpoints and comparisons of torch, on tiles."""
