"""The parts of `kernel_resources.py`."""
