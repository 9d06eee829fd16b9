"""The parts of `step_cost.py`."""
