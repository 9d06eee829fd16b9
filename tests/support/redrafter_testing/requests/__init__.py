# SPDX-License-Identifier: Apache-2.0
"""Requests whose answers must not depend on speculation, and what is asked of answers."""
