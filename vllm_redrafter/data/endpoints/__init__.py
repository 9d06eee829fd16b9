# SPDX-License-Identifier: Apache-2.0
"""Running servers of the target that answer prompts: any number of them, coming and going."""
