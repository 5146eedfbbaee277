"""`parallelize`: gradients, sharded weights and channel-parallel layers of a model that computes on tiles."""
