"""Who may ask, for what, and how much: keys, tenants, scopes, limits."""
