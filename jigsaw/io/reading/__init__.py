"""One read: who fetches and decodes what, carried out by the ranks that share a sample."""
