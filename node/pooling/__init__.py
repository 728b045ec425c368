"""A node of a model that pools: whole requests in batches, without KV."""
