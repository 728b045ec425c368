"""What a node runs once, before it serves: the worst steps that can come, their memory and their time."""
