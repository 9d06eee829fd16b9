# SPDX-License-Identifier: Apache-2.0
"""Draft heads: what drafting and training need of one (`head.py`), and one module per head."""
