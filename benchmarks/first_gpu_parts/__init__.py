# SPDX-License-Identifier: Apache-2.0
"""The parts of `first_gpu_run.sh`."""
