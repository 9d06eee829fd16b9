# SPDX-License-Identifier: Apache-2.0
"""Engines and servers: real vLLM in a process of its own, and one that only pretends."""
