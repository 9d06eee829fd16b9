# SPDX-License-Identifier: Apache-2.0
"""The heads that there are, by the `model_type` in a checkpoint's config.json.

A head of another package is found by its entry point in the group `vllm_redrafter.heads`, which
names the class; or `register` is called before vLLM starts its engine in the same process.
"""

from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from vllm_redrafter.heads.gated import GatedHead
from vllm_redrafter.heads.head import DraftHead, HeadConfig
from vllm_redrafter.heads.recurrent import RecurrentHead
from vllm_redrafter.heads.speculators import LstmSpeculator, MlpSpeculator
from vllm_redrafter.utils.errors import ConfigError

ENTRY_POINTS = "vllm_redrafter.heads"

NAMES: dict[str, type[DraftHead]] = {"recurrent": RecurrentHead, "gated": GatedHead}
"""The heads of this package, by the names that `train --head` takes."""

_SPECULATORS: Sequence[type[DraftHead]] = (MlpSpeculator, LstmSpeculator)
_registered: dict[str, type[DraftHead]] = {
    head.config_class.model_type: head for head in (*NAMES.values(), *_SPECULATORS)
}


def register(head: type[DraftHead]) -> type[DraftHead]:
    """Make a head known by its `model_type`; may stand above its class as a decorator."""
    model_type = head.config_class.model_type
    known = _registered.setdefault(model_type, head)
    if (known.__module__, known.__qualname__) != (head.__module__, head.__qualname__):
        raise ConfigError(
            f"head {head.__qualname__}: {known.__qualname__} has the model_type {model_type!r} "
            "already; give yours another"
        )
    return head


def heads() -> dict[str, type[DraftHead]]:
    """All heads, by `model_type`."""
    _register_installed()
    return _registered


@cache
def _register_installed() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        register(entry.load())


def build_head(config: HeadConfig) -> DraftHead:
    """A head of these sizes, its weights at random."""
    return heads()[config.model_type](config)


def new_head(name: str, vocab_size: int, hidden_size: int, **options: Any) -> DraftHead:
    """A head for a target, its weights at random; `name` is one of `NAMES`.

    `options` are those of `HeadConfig.of_target`.
    """
    return build_head(NAMES[name].config_class.of_target(vocab_size, hidden_size, **options))
