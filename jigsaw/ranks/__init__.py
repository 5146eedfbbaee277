"""Meshes of ranks, how they are started, and how one that fails or hangs is seen by the others."""
