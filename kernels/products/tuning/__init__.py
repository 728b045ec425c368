"""Tables of plans for this device: what is worth measuring, within which time, and where it is kept."""
