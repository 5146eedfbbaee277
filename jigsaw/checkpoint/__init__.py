"""Checkpoints: tensors of all ranks in one folder, which any mesh loads; whole weights in one file."""
