"""Device code of attention over latents but for decode itself."""
