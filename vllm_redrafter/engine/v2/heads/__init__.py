# SPDX-License-Identifier: Apache-2.0
"""Draft heads for few rows on a GPU: as few launches as their mathematics allows."""
