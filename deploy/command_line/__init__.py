"""Options as flags: what they are called here and elsewhere, their bounds, their help."""
