"""Reports for people on a plan or a store, and recommendations."""
