"""One file a transport: local, shm, tcp."""
