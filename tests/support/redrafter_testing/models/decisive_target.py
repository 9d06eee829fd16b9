# SPDX-License-Identifier: Apache-2.0
"""A target that is sure of each token, so that rounding in 16 bits changes no answer."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, MistralConfig

from redrafter_testing.models.families.family import SIZES, VOCAB

VOCAB_SIZE = 64
"""vLLM takes multiples of 64 in a packed output layer."""

_STEPS, _ROWS, _LENGTH = 200, 16, 32


def make_decisive_target(folder: Path) -> Path:
    """Knows a language in which two tokens tell the next one: the best logit leads by some 30."""
    _mistral().save_pretrained(folder)
    return folder


@cache
def _mistral() -> Any:
    """Three seconds on one core."""
    sizes = {**SIZES, "vocab_size": VOCAB_SIZE, "initializer_range": 0.1}
    return trained(MistralConfig(**sizes, sliding_window=8))


def trained(config: Any) -> Any:
    """A model of this configuration that knows the language."""
    with torch.random.fork_rng():
        torch.manual_seed(21)
        # The token before the last counts by its remainder alone: that is learned quickly.
        following = torch.randint(2, VOCAB, (4, VOCAB)).repeat(VOCAB // 4, 1)
        model = AutoModelForCausalLM.from_config(config).float()
        optimizer = torch.optim.Adam(model.parameters())
        rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=_STEPS)
        for _ in range(_STEPS):
            tokens = torch.randint(VOCAB, (_ROWS, _LENGTH))
            optimizer.zero_grad()
            logits = model(input_ids=tokens).logits[:, 1:].flatten(0, 1)
            wanted = following[tokens[:, :-1], tokens[:, 1:]].flatten()
            nn.functional.cross_entropy(logits, wanted).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            rate.step()
    # Logits are that much larger: what is sampled at a temperature is as sure.
    model.model.norm.weight.data *= 4
    return model
