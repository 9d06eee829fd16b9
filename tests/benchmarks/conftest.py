# SPDX-License-Identifier: Apache-2.0
"""Benchmarks import their parts from the folder that they lie in, as Python does for a script."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
