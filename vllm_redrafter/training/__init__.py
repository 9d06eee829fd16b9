# SPDX-License-Identifier: Apache-2.0
"""Training a drafter: text that the target wrote, a distillation loss, a loop. No vLLM import."""
