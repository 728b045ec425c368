"""Router processes: start, sources, metrics, end."""
