"""The source side: decides, without I/O, on the hand-offs of a node that has KV."""
