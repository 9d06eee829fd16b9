"""What is compared: plain decoding, vLLM's own methods, and ReDrafter in its shapes.

ReDrafter's methods are measured with each number of continuations found in the text that is asked
for (`context_matches`), and these alone, without a drafter.

A fixed shape may be bound to a concurrency level, because the number of tokens that pays to verify
shrinks as the batch grows: `1=3x5:12 8=1x3:3`. Without `C=` it is measured at every level. The
adaptive method finds that number itself, so its shapes are maxima and are measured everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared_parts.arguments import positive, shape_text, tree_shape

from vllm_redrafter import ReDrafterConfig

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
"""What ReDrafter is compared with where nothing else is asked for: it needs no checkpoint."""
REDRAFTER_S = ("matches alone", "ReDrafter", "adaptive", "random drafter")
PLAIN_S = ("plain", "plain again")
RESERVED = (*PLAIN_S, "redrafter", "custom_class", *REDRAFTER_S)

GREEDY_NOTE = (
    "vLLM's own methods are measured at temperature 0 only: with its CPU backend (0.32.0) their "
    "sampled output is not the target's"
)
"""V1's rejection sampler expands the requests' temperatures to their draft tokens by
`_expand_kernel_impl` (vllm/utils/cpu_triton_utils.py), which writes into a converted copy that is
dropped: drafts are judged at whatever temperature the memory held before, and hardly one is
accepted, even at temperature 0.001."""


def place_of(name: str) -> int:
    """Of a method in tables: plain decoding, then vLLM's own methods, then ReDrafter's."""
    if name in PLAIN_S:
        return PLAIN_S.index(name)
    return 3 + REDRAFTER_S.index(name) if name in REDRAFTER_S else 2


class InputError(ValueError):
    """Something that was asked for cannot be measured; the message names it and the remedy."""


@dataclass(frozen=True)
class Method:
    """One engine: a way to decode, and the concurrency levels it is measured at.

    Attributes:
        name: which way; `plain again` is plain decoding in a second engine; `ReDrafter` verifies K
            nodes in every step, `adaptive` at most K, as many as pay, `random drafter` is adaptive
            with a drafter of random weights, and `matches alone` without one; vLLM's own methods
            have its names.
        shape: how it speculates, as given on the command line; of vLLM's own methods the model and
            the number of tokens; empty for plain decoding.
        levels: numbers of requests in flight, ascending.
        speculative_config: vLLM's setting of that name.
    """

    name: str
    shape: str
    levels: tuple[int, ...]
    speculative_config: dict[str, Any] | None

    @property
    def label(self) -> str:
        return f"{self.name} {self.shape}".strip()

    @property
    def drafts_with_redrafter(self) -> bool:
        return self.name in REDRAFTER_S

    @property
    def is_adaptive(self) -> bool:
        """Whether it decides by what steps cost, which it measures when it starts as well."""
        return self.name in ("matches alone", "adaptive", "random drafter")

    def temperatures(self, asked: Sequence[float], is_cpu: bool) -> list[float]:
        """Those at which the method can be measured, of those asked for; see GREEDY_NOTE."""
        plain = self.speculative_config is None
        greedy_only = is_cpu and not plain and not self.drafts_with_redrafter
        return [temperature for temperature in asked if temperature == 0 or not greedy_only]


def plan(
    drafter: str,
    levels: Sequence[int],
    shapes: Sequence[str],
    adaptive: Sequence[str],
    others: Sequence[Mapping[str, Any]] = (),
    context_matches: Sequence[int] = (),
    matches_alone: bool = False,
) -> list[Method]:
    """The engines to measure, as few as will do: one per method and shape.

    Args:
        drafter: the ReDrafter checkpoint.
        levels: numbers of requests in flight.
        shapes: each `[C=]WxL:K`, all K nodes verified in every step.
        adaptive: each `WxL:K`, the maxima of an adaptive method.
        others: speculative configs of vLLM's own methods.
        context_matches: how many continuations found in the text the shapes are measured with, each
            with each number; empty for the engine's default.
        matches_alone: measure them without a drafter too, with K of each adaptive shape.

    Raises:
        argparse.ArgumentTypeError: bad syntax, or a shape that ReDrafter refuses.
        InputError: a level that no shape is measured at; or see `_other`.
    """
    levels = sorted(set(levels))
    everywhere = tuple(levels)
    methods = [Method("plain", "", everywhere, None)]
    methods += [_other(config, everywhere) for config in others]
    labels = [method.label for method in methods]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise InputError(
            f"--method: {twice[0]} is given twice: a comparison knows methods by their names, "
            "models and numbers of tokens; leave one out"
        )
    maxima = list(dict.fromkeys(map(tree_shape, adaptive)))
    if matches_alone:
        for k in dict.fromkeys(shape.num_speculative_tokens for shape in maxima):
            methods.append(Method("matches alone", str(k), everywhere, _without_drafter(k)))
    fixed = _levels_of([_bound_shape(text) for text in shapes], levels) if shapes else {}
    for matches in dict.fromkeys(context_matches) or [None]:
        found = "" if matches is None else f", matches {matches}"
        for shape, at in fixed.items():
            config = _config(drafter, replace(shape, adaptive=False), matches)
            methods.append(Method("ReDrafter", shape_text(shape) + found, at, config))
        for shape in maxima:
            config = _config(drafter, shape, matches)
            methods.append(Method("adaptive", shape_text(shape) + found, everywhere, config))
    return methods


def with_random_drafter(methods: Sequence[Method], drafter: str) -> list[Method]:
    """The adaptive ones of the methods once more, with this checkpoint, of random weights."""
    return [
        replace(
            method,
            name="random drafter",
            speculative_config={**(method.speculative_config or {}), "model": drafter},
        )
        for method in methods
        if method.name == "adaptive"
    ]


def _other(config: Mapping[str, Any], levels: tuple[int, ...]) -> Method:
    """One of vLLM's own methods.

    Raises:
        InputError: the config has no name that vLLM's methods have, or no number of tokens.
    """
    name, tokens = config.get("method"), config.get("num_speculative_tokens")
    if not isinstance(name, str) or name in RESERVED:
        raise InputError(
            f"--method: 'method' must name one of vLLM's own, such as ngram, eagle3 or "
            f"draft_model, got {name!r}"
        )
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise InputError(
            f"--method: {name}'s num_speculative_tokens must be an integer of at least 1, "
            f"got {tokens!r}"
        )
    model = [Path(config["model"]).name] if isinstance(config.get("model"), str) else []
    return Method(name, ", ".join([*model, str(tokens)]), levels, dict(config))


def _without_drafter(num_tokens: int) -> dict[str, Any]:
    return {"method": "redrafter", "num_speculative_tokens": num_tokens}


def _config(drafter: str, shape: ReDrafterConfig, context_matches: int | None) -> dict[str, Any]:
    config = {
        "model": drafter,
        "num_speculative_tokens": shape.num_speculative_tokens,
        "beam_width": shape.beam_width,
        "beam_length": shape.beam_length,
        "adaptive": shape.adaptive,
    }
    if context_matches is not None:
        config["context_matches"] = context_matches
    if not shape.adaptive:
        # At every batch: on a GPU the default schedule would lower it.
        config["num_speculative_tokens_per_batch_size"] = [[1, 1, shape.num_speculative_tokens]]
    return config


def _bound_shape(text: str) -> tuple[int | None, ReDrafterConfig]:
    level, bound, shape = text.rpartition("=")
    return positive(level) if bound else None, tree_shape(shape)


def _levels_of(
    bound: Sequence[tuple[int | None, ReDrafterConfig]], levels: Sequence[int]
) -> dict[ReDrafterConfig, tuple[int, ...]]:
    """By shape, the levels it is measured at: the one it is bound to, or all."""
    found: dict[ReDrafterConfig, set[int]] = {}
    for level, shape in bound:
        if level is not None and level not in levels:
            raise InputError(
                f"--shape is bound to concurrency {level}, which is not measured: add it to "
                "--concurrency"
            )
        found.setdefault(shape, set()).update(levels if level is None else [level])
    for level in levels:
        if not any(level in at for at in found.values()):
            raise InputError(
                f"--shape: nothing is given for concurrency {level}: add one without C=, or with "
                f"{level}="
            )
    return {shape: tuple(sorted(at)) for shape, at in found.items()}
