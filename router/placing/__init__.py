"""Which nodes serve a request, and which sequences should move. Pure."""
