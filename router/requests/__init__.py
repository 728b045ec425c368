"""The life of each request across nodes: a pure machine, and the service that carries it out."""
