"""What a body asks for: its schema, whose it is, its token ids; and the way back from ids to text."""
