"""What a body asks for: its schema, its token ids; and the way back from ids to text."""
