# SPDX-License-Identifier: Apache-2.0
"""Stands in for what benchmarks measure: cases that are small, and figures made up."""
