"""One read, carried out by the ranks that share a sample: which rank fetches and decodes which chunk."""
