"""Leading blocks that rows of a decode batch share."""
