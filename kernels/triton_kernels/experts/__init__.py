"""Device code of mixtures of experts."""
