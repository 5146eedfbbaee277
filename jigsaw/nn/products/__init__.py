"""Linear layers, matrix products, einsum, embeddings and recurrent layers on tiles."""
