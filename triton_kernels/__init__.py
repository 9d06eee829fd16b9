# SPDX-License-Identifier: Apache-2.0
"""The device kernels live here; they are imported as `vllm_redrafter.triton_kernels`."""
