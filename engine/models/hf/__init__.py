"""Decoders of transformers, run by its own modules over our paged attention."""
