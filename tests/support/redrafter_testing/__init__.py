# SPDX-License-Identifier: Apache-2.0
"""What tests of vllm-redrafter share; each folder says what its helpers stand in for.

Only this package and `interpreted/` are found through PYTHONPATH (tests/conftest.py), so that the
processes which tests start, vLLM's workers among them, can import the helpers too.
"""
