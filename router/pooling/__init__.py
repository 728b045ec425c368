"""`/v1/embeddings`, `/score` and `/rerank`: texts in, vectors or scores out."""
