"""Models that make one vector, or one score, of a text."""
