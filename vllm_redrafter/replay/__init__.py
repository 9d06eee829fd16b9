# SPDX-License-Identifier: Apache-2.0
"""The decoding of text that the target wrote, replayed without an engine."""
