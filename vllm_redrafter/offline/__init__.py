# SPDX-License-Identifier: Apache-2.0
"""vLLM without a server, by its public API alone: writing answers, and capturing hidden states."""
