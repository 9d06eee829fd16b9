"""Training data: prompts, what the target answers to them, and the rows that come of it."""
