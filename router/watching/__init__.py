"""What operators watch: all of a router's processes together, one request's story, and the dashboard's feed."""
