# SPDX-License-Identifier: Apache-2.0
"""Adapters to vLLM: with plugin.py the only code that imports vLLM's internals."""
