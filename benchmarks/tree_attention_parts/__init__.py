"""The parts of `tree_attention.py`."""
