# SPDX-License-Identifier: Apache-2.0
"""The device kernels live here; they are imported as `vllm_redrafter.triton_kernels`.

A function that launches kernels checks its arguments first: a ValueError names the first one whose
dtype, device, shape or stride does not fit.
"""
