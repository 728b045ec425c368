"""What attention over latents does with a step's new tokens: rows of the cache, absorbed queries, heads' values."""
