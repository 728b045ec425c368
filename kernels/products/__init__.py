"""Matrix products of few rows, and what is fused between them."""
