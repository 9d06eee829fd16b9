# SPDX-License-Identifier: Apache-2.0
"""How many nodes the whole batch verifies, and whether it drafts at all: docs/serving.md."""
