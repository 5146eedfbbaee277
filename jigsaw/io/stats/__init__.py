"""Statistics of channels: streamed, merged exactly, read and written, and applied."""
