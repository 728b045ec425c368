"""The sink side: decides, without I/O, on tickets, grants and commits of a node that receives KV."""
