"""What is compared: plain decoding, n-gram speculation and ReDrafter, each in its shapes.

A fixed shape may be bound to a concurrency level, because the number of tokens that pays to verify
shrinks as the batch grows: `1=3x5:12 8=1x3:3`. Without `C=` it is measured at every level. The
adaptive method finds that number itself, so its shapes are maxima and are measured everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from vllm_redrafter import ReDrafterConfig

S = TypeVar("S")

FurtherDrafter = Literal["other drafter", "random drafter"]
MethodName = Literal["plain", "plain again", "n-gram", "ReDrafter", "adaptive", FurtherDrafter]

NGRAM_LOOKUP = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}

NGRAM_NOTE = (
    "n-gram speculation is measured at temperature 0 only: with vLLM's CPU backend (0.32.0) its "
    "sampled output is not the target's"
)
"""V1's rejection sampler expands the requests' temperatures to their draft tokens by
`_expand_kernel_impl` (vllm/utils/cpu_triton_utils.py), which writes into a converted copy that is
dropped: drafts are judged at whatever temperature the memory held before, and hardly one is
accepted, even at temperature 0.001."""


class InputError(ValueError):
    """Something that was asked for cannot be measured; the message names it and the remedy."""


@dataclass(frozen=True)
class Method:
    """One engine: a way to decode, and the concurrency levels it is measured at.

    Attributes:
        name: which way; `plain again` is plain decoding in a second engine; `ReDrafter` verifies K
            nodes in every step, `adaptive` at most K, as many as pay, and `other drafter` and
            `random drafter` are adaptive with another drafter and with one of random weights.
        shape: how it speculates, as given on the command line; empty for plain decoding.
        levels: numbers of requests in flight, ascending.
        speculative_config: vLLM's setting of that name.
    """

    name: MethodName
    shape: str
    levels: tuple[int, ...]
    speculative_config: dict[str, Any] | None

    @property
    def label(self) -> str:
        return f"{self.name} {self.shape}".strip()

    @property
    def drafts_with_redrafter(self) -> bool:
        return self.name not in ("plain", "plain again", "n-gram")

    @property
    def is_adaptive(self) -> bool:
        """Whether it decides by what steps cost, which it measures when it starts as well."""
        return self.name in ("adaptive", "other drafter", "random drafter")

    def temperatures(self, asked: Sequence[float], is_cpu: bool) -> list[float]:
        """Those at which the method can be measured, of those asked for; see NGRAM_NOTE."""
        greedy_only = self.name == "n-gram" and is_cpu
        return [temperature for temperature in asked if temperature == 0 or not greedy_only]


def plan(
    drafter: str,
    levels: Sequence[int],
    shapes: Sequence[str],
    ngram_tokens: Sequence[str],
    adaptive: Sequence[str] = (),
) -> list[Method]:
    """The engines to measure, as few as will do: one per method and shape.

    Args:
        drafter: the ReDrafter checkpoint.
        levels: numbers of requests in flight.
        shapes: each `[C=]WxL:K`, all K nodes verified in every step.
        ngram_tokens: each `[C=]K`; none leaves n-gram speculation out.
        adaptive: each `WxL:K`, the maxima of an adaptive method.

    Raises:
        InputError: bad syntax, or a level that no shape, or no n-gram K, is measured at.
        vllm_redrafter.ConfigError: a shape that ReDrafter refuses.
    """
    levels = sorted(set(levels))
    if levels[0] < 1:
        raise InputError(f"--concurrency {levels[0]}: at least one request must be in flight")
    methods = [Method("plain", "", tuple(levels), None)]
    bound_tokens = [_parse_ngram(text) for text in ngram_tokens]
    found = _levels_of("--ngram-tokens", bound_tokens, levels) if bound_tokens else {}
    for tokens, at in found.items():
        config = {"method": "ngram", "num_speculative_tokens": tokens, **NGRAM_LOOKUP}
        methods.append(Method("n-gram", str(tokens), at, config))
    bound_shapes = [_parse_shape("--shape", text) for text in shapes]
    for shape, at in _levels_of("--shape", bound_shapes, levels).items():
        fixed = replace(shape, adaptive=False)
        methods.append(Method("ReDrafter", _written(shape), at, _config(drafter, fixed)))
    for maxima in dict.fromkeys(_parse_maxima(text) for text in adaptive):
        config = _config(drafter, maxima)
        methods.append(Method("adaptive", _written(maxima), tuple(levels), config))
    return methods


def with_drafter(methods: Sequence[Method], name: FurtherDrafter, drafter: str) -> list[Method]:
    """The adaptive methods once more, with a further drafter.

    Args:
        methods: all that is measured.
        name: what it is there.
        drafter: its checkpoint.

    Raises:
        InputError: no method is adaptive.
    """
    found = [method for method in methods if method.name == "adaptive"]
    if not found:
        raise InputError(
            f"--{name.replace(' ', '-')} is measured with the adaptive method: leave out "
            "--no-adaptive"
        )
    return [
        replace(
            method,
            name=name,
            speculative_config={**(method.speculative_config or {}), "model": drafter},
        )
        for method in found
    ]


def _config(drafter: str, shape: ReDrafterConfig) -> dict[str, Any]:
    config = {
        "model": drafter,
        "num_speculative_tokens": shape.num_speculative_tokens,
        "beam_width": shape.beam_width,
        "beam_length": shape.beam_length,
        "adaptive": shape.adaptive,
    }
    if not shape.adaptive:
        # At every batch: on a GPU the default schedule would lower it.
        config["num_speculative_tokens_per_batch_size"] = [[1, 1, shape.num_speculative_tokens]]
    return config


def _parse_maxima(text: str) -> ReDrafterConfig:
    level, shape = _parse_shape("--adaptive", text)
    if level is not None:
        raise InputError(
            f"--adaptive {text!r}: the adaptive method is measured at every concurrency; leave out "
            f"{level}="
        )
    return shape


def _parse_shape(option: str, text: str) -> tuple[int | None, ReDrafterConfig]:
    found = re.fullmatch(r"(?:(\d+)=)?(\d+)x(\d+):(\d+)", text)
    if not found:
        raise InputError(
            f"{option} {text!r}: expected WxL:K (beam width, beam length, tree nodes verified), "
            "as in 2x4:6" + (", or C=WxL:K for concurrency C only" if option == "--shape" else "")
        )
    level, width, length, nodes = found.groups()
    return _level(level), ReDrafterConfig(int(nodes), int(width), int(length))


def _parse_ngram(text: str) -> tuple[int | None, int]:
    found = re.fullmatch(r"(?:(\d+)=)?([1-9]\d*)", text)
    if not found:
        raise InputError(
            f"--ngram-tokens {text!r}: expected K, the most tokens proposed per step, as in 5, "
            "or C=K for concurrency C only"
        )
    return _level(found[1]), int(found[2])


def _level(text: str | None) -> int | None:
    return None if text is None else int(text)


def _written(shape: ReDrafterConfig) -> str:
    return f"{shape.beam_width}x{shape.beam_length}:{shape.num_speculative_tokens}"


def _levels_of(
    option: str, bound: Sequence[tuple[int | None, S]], levels: Sequence[int]
) -> dict[S, tuple[int, ...]]:
    """By shape, the levels it is measured at: the one it is bound to, or all."""
    found: dict[S, set[int]] = {}
    for level, shape in bound:
        if level is not None and level not in levels:
            raise InputError(
                f"{option} is bound to concurrency {level}, which is not measured: add it to "
                "--concurrency"
            )
        found.setdefault(shape, set()).update(levels if level is None else [level])
    for level in levels:
        if not any(level in at for at in found.values()):
            raise InputError(
                f"{option}: nothing is given for concurrency {level}: add one without C=, or with "
                f"{level}="
            )
    return {shape: tuple(sorted(at)) for shape, at in found.items()}
