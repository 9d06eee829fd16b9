"""The parts of `throughput.py`."""
