"""Checkpoints of drafters: reading, writing, converting, inspecting."""
