# SPDX-License-Identifier: Apache-2.0
"""What `soak.py` is made of."""
