# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of drafters: reading, writing, converting, inspecting."""
