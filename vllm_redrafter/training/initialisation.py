"""The drafter before its first step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from vllm_redrafter.checkpoints.drafter_files import weights_path
from vllm_redrafter.checkpoints.reading import load_config, load_drafter
from vllm_redrafter.data.rows import TextRow, TextRows
from vllm_redrafter.data.target_files import load_from
from vllm_redrafter.heads.head import DraftHead, HeadConfig
from vllm_redrafter.heads.registry import build_head, head_name, new_head
from vllm_redrafter.heads.target_layers import layers_of, parsed_layers
from vllm_redrafter.training.training_config import TrainingConfig
from vllm_redrafter.utils.errors import ConfigError


def new_drafter(target: Any, config: TrainingConfig, kept: Tensor | None = None) -> DraftHead:
    """A drafter of the target's sizes; its last layer starts as the target's own, where it fits.

    Args:
        target: a transformers causal language model.
        config: the drafter's sizes, the initialisation and its seed.
        kept: [draft tokens] int64, the draft vocabulary; None for all tokens.

    Raises:
        ConfigError: sizes that cannot be.
    """
    sizes = target.config.get_text_config()
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        drafter = new_head(
            config.head,
            sizes.vocab_size,
            sizes.hidden_size,
            beam_length=config.unroll_steps,
            exit_dim=config.exit_dim,
            num_draft_layers=config.num_draft_layers,
            draft_vocab_size=None if kept is None else len(kept),
            target_layers=named_layers(config),
        )
    if kept is not None:
        drafter.keep_tokens(kept)
    lm_head = target.get_output_embeddings()
    if config.init == "lm_head" and lm_head is not None:
        weight = lm_head.weight if kept is None else lm_head.weight[kept.to(lm_head.weight.device)]
        for layer in drafter.vocabulary_layers:
            if weight.shape == layer.weight.shape:
                layer.weight.data.copy_(weight)
    return drafter


def sizes_of(initial: str, config: TrainingConfig) -> TrainingConfig:
    """The settings of a training that goes on from a drafter: its sizes are that drafter's.

    Args:
        initial: the drafter, a folder or a hub id.
        config: the settings that were asked for.

    Raises:
        ConfigError: no such drafter, or a setting says something else than its checkpoint.
    """
    found = load_config(initial)
    defaults = TrainingConfig()
    names = [f.name for f in fields(found) if hasattr(config, f.name)]
    sizes = {name: getattr(found, name) for name in names if name != "target_layers"}
    # One of another package has no name here.
    sizes["head"] = head_name(found) or defaults.head
    for name, own in (*sizes.items(), ("init", defaults.init)):
        asked = getattr(config, name)
        if asked not in (getattr(defaults, name), own):
            reason = f"it has {own}" if name in sizes else "nothing is initialised"
            raise ConfigError(
                f"training: {name} {asked} does not fit initial_drafter {initial!r}: {reason}; "
                f"leave {name} out, or train from the beginning"
            )
    return replace(config, **sizes, target_layers=_layers_to_go_on_with(initial, found, config))


def _layers_to_go_on_with(initial: str, found: HeadConfig, config: TrainingConfig) -> str | None:
    """The layers that a drafter reads, or is to read from now on."""
    own = ",".join(map(str, found.target_layers)) or None
    asked = config.target_layers
    if own is not None and asked not in (None, own):
        raise ConfigError(
            f"training: target_layers {asked} does not fit initial_drafter {initial!r}: it reads "
            f"layers {own}; leave target_layers out, or train from the beginning"
        )
    return asked or own


def with_named_layers(config: TrainingConfig, target: str) -> TrainingConfig:
    """The settings with the layers of the target by their numbers.

    Args:
        config: may name them `auto`.
        target: folder or hub id; its config.json alone is read.

    Raises:
        ConfigError: the target does not have them.
    """
    if config.target_layers is None:
        return config
    num_layers = load_from(AutoConfig, target).get_text_config().num_hidden_layers
    layers = layers_of(config.target_layers, num_layers, "training: target_layers")
    return replace(config, target_layers=",".join(map(str, layers)))


def named_layers(config: TrainingConfig) -> tuple[int, ...]:
    """The layers of settings that `with_named_layers` has returned."""
    layers = parsed_layers(config.target_layers, "training: target_layers")
    assert layers is not None
    return layers


def continued_drafter(initial: str, target: Any, layers: tuple[int, ...] = ()) -> DraftHead:
    """A drafter that was trained before, to be trained on: float32, its draft vocabulary with it.

    Args:
        initial: a folder or a hub id.
        target: a transformers causal language model.
        layers: that it is to read from now on; one that read none drafts as before, for now.

    Raises:
        ConfigError: no such drafter, or it belongs to a target of other sizes.
    """
    drafter = load_drafter(initial)
    sizes, found = target.config.get_text_config(), drafter.config
    if (found.vocab_size, found.hidden_size) != (sizes.vocab_size, sizes.hidden_size):
        raise ConfigError(
            f"training: initial_drafter {initial!r} drafts for a target with a vocabulary of "
            f"{found.vocab_size} and hidden size {found.hidden_size}; this one has "
            f"{sizes.vocab_size} and {sizes.hidden_size}: give a drafter of this target, or leave "
            "initial_drafter out"
        )
    if layers != found.target_layers:
        drafter = _fused(drafter, layers)
    return drafter.train().requires_grad_(True)


def _fused(drafter: DraftHead, layers: tuple[int, ...]) -> DraftHead:
    """The same drafter with a place for what it is to read besides: zeros."""
    larger = build_head(replace(drafter.config, target_layers=layers))
    larger.load_state_dict(drafter.state_dict(), strict=False)
    return larger


def weights_digest(drafter: str) -> str:
    """The sha256 of a drafter's weights, by which a training run knows what it began with."""
    with Path(weights_path(drafter)).open("rb") as weights:
        return hashlib.file_digest(weights, "sha256").hexdigest()


def most_used_tokens(rows: TextRows, vocab_size: int, kept: int) -> tuple[Tensor, float]:
    """The tokens that the target used most.

    Args:
        rows: the text.
        vocab_size: of the target.
        kept: how many.

    Returns:
        ([kept] int64 in ascending order, the share of the target's tokens that they cover).

    Raises:
        ConfigError: more are asked for than there are.
    """
    if kept > vocab_size:
        raise ConfigError(
            f"training: draft_vocab_size {kept} exceeds the target's vocabulary of {vocab_size}; "
            "leave it out to rank all tokens"
        )
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for row in _each(rows):
        counts += torch.bincount(row.tokens[row.generated], minlength=vocab_size)
    best = counts.sort(descending=True, stable=True).indices[:kept].sort().values
    return best, float(counts[best].sum() / counts.sum().clamp(min=1))


def _each(rows: TextRows) -> Iterator[TextRow]:
    return (rows[index] for index in range(len(rows)))
