"""`/v1/responses`: items in, items and events out; between them a conversation like any other."""
