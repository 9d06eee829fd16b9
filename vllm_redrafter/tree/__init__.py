# SPDX-License-Identifier: Apache-2.0
"""The algorithm: beam search, the token tree, and the walk that accepts a path of it."""
