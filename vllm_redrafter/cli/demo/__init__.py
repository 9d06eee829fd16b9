# SPDX-License-Identifier: Apache-2.0
"""The demo: SmolLM2-135M-Instruct in vLLM, or mlx-lm, without and with ReDrafter."""
