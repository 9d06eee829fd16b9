# SPDX-License-Identifier: Apache-2.0
"""What stands in for a GPU: an interpreter for its kernels, recordings for its graphs."""
