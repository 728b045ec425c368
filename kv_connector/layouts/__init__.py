"""Where bytes of a block lie, and how blocks of one node become those of another."""
