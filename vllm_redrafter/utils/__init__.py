# SPDX-License-Identifier: Apache-2.0
"""What all parts use: errors, names, files, settings."""
