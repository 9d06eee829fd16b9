# SPDX-License-Identifier: Apache-2.0
"""ReDrafter on vLLM's CPU backend (V1 model runner)."""
