"""HTTP: bodies in, events out, keys, errors."""
