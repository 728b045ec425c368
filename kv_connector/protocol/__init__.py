"""The hand-off protocol as two pure transition tables, source and sink."""
