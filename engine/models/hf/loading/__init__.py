"""A decoder of transformers, with its weights."""
