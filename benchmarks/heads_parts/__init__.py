"""The parts of `heads.py`."""
