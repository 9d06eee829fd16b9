# SPDX-License-Identifier: Apache-2.0
"""ReDrafter on vLLM's Model Runner V2: the whole step on the device (CUDA)."""
