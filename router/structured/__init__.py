"""From what a body wants its answer to be to one grammar, checked."""
