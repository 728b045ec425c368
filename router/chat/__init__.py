"""Chat: messages to a prompt by templates, and text back to reasoning, content and tool calls. Pure."""
