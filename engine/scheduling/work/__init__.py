"""What a node tells of its work."""
