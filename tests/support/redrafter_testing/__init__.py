# SPDX-License-Identifier: Apache-2.0
"""What tests share, outside the package that they test."""
