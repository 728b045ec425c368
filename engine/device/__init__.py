"""Device memory and its driver: the KV pool, uploads, calls that torch lacks."""
