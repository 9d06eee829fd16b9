# SPDX-License-Identifier: Apache-2.0
"""How a host drafts: search, matches of the text, ranking, and what is learned from the walk."""
