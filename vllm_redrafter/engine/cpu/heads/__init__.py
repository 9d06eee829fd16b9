# SPDX-License-Identifier: Apache-2.0
"""Draft heads for few rows on a host: as few calls and products as their mathematics allows."""
