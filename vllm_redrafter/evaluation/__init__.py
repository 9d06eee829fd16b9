# SPDX-License-Identifier: Apache-2.0
"""How good a drafter is, without serving it."""
