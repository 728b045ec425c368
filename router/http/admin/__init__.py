"""What operators ask by HTTP."""
