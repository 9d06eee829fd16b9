# SPDX-License-Identifier: Apache-2.0
"""One answer, traced: every step's draft on a page."""
