# SPDX-License-Identifier: Apache-2.0
"""The algorithm restated plainly, and trees of given shapes: what results are compared with."""
