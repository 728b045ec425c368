"""What models and nodes call: attention, its metadata, its backends' interface, the choice among them."""
