# SPDX-License-Identifier: Apache-2.0
"""What several benchmarks use."""
