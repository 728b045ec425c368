"""Pages of the documentation site that are read off the code: commands, HTTP paths, Python's names (`make docs`)."""
