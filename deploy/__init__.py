"""How Tandem is run: command line, local launcher, embedded Redis, demo model."""
