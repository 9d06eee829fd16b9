# SPDX-License-Identifier: Apache-2.0
"""Drafting and acceptance whose outcome is known beforehand: always right, or surely wrong."""

CPU_ORACLE = "redrafter_testing.oracles.oracle.OracleProposer"
V2_ORACLE = "redrafter_testing.oracles.oracle_v2.OracleSpeculator"
"""As vLLM is told of classes: by their paths."""
