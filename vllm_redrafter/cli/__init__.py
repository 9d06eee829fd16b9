# SPDX-License-Identifier: Apache-2.0
"""What people call: `vllm-redrafter <command>`, and `python -m vllm_redrafter`."""
