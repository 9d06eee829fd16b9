# SPDX-License-Identifier: Apache-2.0
"""Targets, adapters and drafters small enough to make in a test, and data to train on."""
