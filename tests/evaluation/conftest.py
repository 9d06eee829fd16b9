# SPDX-License-Identifier: Apache-2.0
"""What trainings of a few steps need."""

from redrafter_testing.models.small_trainings import data, fresh_accelerate, one_thread, target

__all__ = ["data", "fresh_accelerate", "one_thread", "target"]
