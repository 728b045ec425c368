"""`tandem serve`: which children a local cluster has, and how they start, live and end."""
