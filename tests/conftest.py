"""For all tests: what the processes that they start need."""

from __future__ import annotations

import os

from redrafter_testing.python_path import SUPPORT, python_path

os.environ["PYTHONPATH"] = python_path(SUPPORT)
