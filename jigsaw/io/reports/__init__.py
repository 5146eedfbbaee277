"""What a plan or a store means for a person, and what would be better."""
