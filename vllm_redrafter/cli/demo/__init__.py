# SPDX-License-Identifier: Apache-2.0
"""The demo: SmolLM2-135M-Instruct in vLLM, or mlx-lm, without and with ReDrafter, side by side.

What is made or fetched is kept in a cache folder and used again by the next run.
"""
