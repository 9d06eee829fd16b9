"""The decoding of text that the target wrote, replayed without an engine."""
