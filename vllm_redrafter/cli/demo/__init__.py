# SPDX-License-Identifier: Apache-2.0
"""The demo: SmolLM2-135M-Instruct in vLLM, without and with ReDrafter."""
