"""What decoder layers of our own are made of."""
