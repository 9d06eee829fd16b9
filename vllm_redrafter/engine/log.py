# SPDX-License-Identifier: Apache-2.0
"""Our logger, among vLLM's: it has their format, and their VLLM_LOGGING_LEVEL."""

from vllm.logger import init_logger

logger = init_logger("vllm.redrafter")
