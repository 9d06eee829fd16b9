# SPDX-License-Identifier: Apache-2.0
"""Training data: prompts, what the target answers to them, and the rows that come of it."""
