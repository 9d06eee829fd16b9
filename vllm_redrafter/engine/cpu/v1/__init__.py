# SPDX-License-Identifier: Apache-2.0
"""What stands on Model Runner V1: its runner, its sampler, its interface for proposers."""
