"""A node's KV blocks by id: references, hashes, tenants. Pure; imports contracts alone."""
