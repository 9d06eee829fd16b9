"""The parts of `step_parts.py`."""
