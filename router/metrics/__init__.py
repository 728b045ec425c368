"""What /metrics shows: the list of names, the router's own figures, and those that nodes report."""
