"""The parts of `replay.py`."""
