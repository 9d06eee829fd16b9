# SPDX-License-Identifier: Apache-2.0
"""What is compared: plain decoding, vLLM's own methods, and ReDrafter in its shapes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from shared_parts.arguments import shape_text

from vllm_redrafter import ConfigError, ReDrafterConfig
from vllm_redrafter.engine.speculative_config import OF_DRAFTER
from vllm_redrafter.utils.names import METHOD

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
"""What ReDrafter is compared with where nothing else is asked for: it needs no checkpoint."""
OURS = ("matches alone", "ReDrafter", "adaptive")
RESERVED = ("plain", "plain again", METHOD, "custom_class", *OURS)

GREEDY_NOTE = (
    "vLLM's own methods are measured at temperature 0 only: with its CPU backend (0.32.0) their "
    "sampled output is not the target's"
)
"""V1's rejection sampler expands the requests' temperatures to their draft tokens by
`_expand_kernel_impl` (vllm/utils/cpu_triton_utils.py), which writes into a converted copy that is
dropped: drafts are judged at whatever temperature the memory held before, and hardly one is
accepted, even at temperature 0.001."""


@dataclass(frozen=True)
class Method:
    """One engine: a way to decode.

    Attributes:
        name: which way; `plain again` is plain decoding in a second engine; `ReDrafter` verifies K
            nodes in every step, `adaptive` at most K, as many as pay, and so does `matches alone`
            without a drafter; vLLM's own methods have its names, also where their drafter's
            chain is verified `in a tree`.
        shape: how it speculates; of vLLM's own methods the model and the number of tokens; empty
            for plain decoding.
        speculative_config: vLLM's setting of that name.
    """

    name: str
    shape: str
    speculative_config: dict[str, Any] | None

    @property
    def label(self) -> str:
        return f"{self.name} {self.shape}".strip()

    @property
    def is_adaptive(self) -> bool:
        """Whether it decides by what steps cost, which it measures when it starts as well."""
        config = self.speculative_config or {}
        return config.get("method") == METHOD and config.get("adaptive", True)

    def temperatures(self, asked: Sequence[float], is_cpu: bool) -> list[float]:
        """Those at which the method can be measured, of those asked for; see GREEDY_NOTE."""
        method = (self.speculative_config or {}).get("method")
        greedy_only = is_cpu and method not in (None, METHOD)
        return [temperature for temperature in asked if temperature == 0 or not greedy_only]


def plan(
    drafters: Sequence[str],
    shapes: Sequence[ReDrafterConfig],
    adaptive: Sequence[ReDrafterConfig],
    others: Sequence[Mapping[str, Any]] = (),
    settings: Sequence[Mapping[str, Any]] = ({},),
    matches_alone: bool = False,
    plain_again: bool = False,
) -> list[Method]:
    """The engines to measure, one per method and shape, in the order of tables.

    Args:
        drafters: ReDrafter checkpoints; tables name them where there are several.
        shapes: whose K nodes are all verified in every step.
        adaptive: the maxima of an adaptive method.
        others: speculative configs of vLLM's own methods, or with such a `draft`.
        settings: parts of a speculative config; our methods are measured with each.
        matches_alone: measure continuations found in texts without a drafter too, with K of each
            adaptive shape.
        plain_again: plain decoding in a second engine.

    Raises:
        ConfigError: see `_other`; or two methods that a table could not tell apart.
    """
    methods = [Method("plain", "", None)]
    if plain_again:
        methods.append(Method("plain again", "", None))
    known = [_other(config) for config in others]
    methods += [_told_apart(method, known) for method in known]
    counts = dict.fromkeys(shape.num_speculative_tokens for shape in adaptive if matches_alone)
    ours: list[tuple[str, str, dict[str, Any]]] = [
        ("matches alone", str(k), {"method": METHOD, "num_speculative_tokens": k}) for k in counts
    ]
    fixed = [replace(shape, adaptive=False) for shape in shapes]
    for drafter, shape in product(drafters, [*fixed, *adaptive]):
        name = "adaptive" if shape.adaptive else "ReDrafter"
        which = [Path(drafter).name] if len(drafters) > 1 else []
        ours.append((name, ", ".join([*which, shape_text(shape)]), _config(drafter, shape)))
    for name, size, config in ours:
        for more in settings:
            has_part = more.get("context_matches") != 0 and not more.keys() & {*OF_DRAFTER}
            if name != "matches alone" or has_part:
                text = ", ".join([size, *(f"{key} {value}" for key, value in more.items())])
                methods.append(Method(name, text, {**config, **more}))
    labels = [method.label for method in methods]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ConfigError(
            f"{twice[0]} is given twice: a comparison knows methods by their names and settings; "
            "leave one out"
        )
    return methods


def _other(config: Mapping[str, Any]) -> Method:
    """One of vLLM's own methods, or one of its drafters in a tree of ours.

    Raises:
        ConfigError: the config has no name that vLLM's methods have, or no number of tokens.
    """
    in_tree = config.get("method") == METHOD and isinstance(config.get("draft"), Mapping)
    own = config["draft"] if in_tree else config
    name, tokens = own.get("method"), own.get("num_speculative_tokens")
    if not isinstance(name, str) or name in RESERVED:
        raise ConfigError(
            f"--method: 'method' must name one of vLLM's own, such as ngram, eagle3 or "
            f"draft_model, got {name!r}"
        )
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ConfigError(
            f"--method: {name}'s num_speculative_tokens must be an integer of at least 1, "
            f"got {tokens!r}"
        )
    parts = [Path(own["model"]).name] if isinstance(own.get("model"), str) else []
    parts.append(str(tokens))
    if in_tree:
        name, parts = f"{name} in a tree", [*parts, str(config.get("num_speculative_tokens"))]
    return Method(name, ", ".join(parts), dict(config))


def _told_apart(method: Method, others: Sequence[Method]) -> Method:
    """The method, its shape with those settings in which others of its name and size differ."""
    alike = [other.speculative_config or {} for other in others if other.label == method.label]
    own = (method.speculative_config or {}).items()
    apart = [f"{k} {v}" for k, v in own if any(config.get(k) != v for config in alike)]
    return replace(method, shape=", ".join([method.shape, *apart]))


def _config(drafter: str, shape: ReDrafterConfig) -> dict[str, Any]:
    sizes = "num_speculative_tokens", "beam_width", "beam_length", "adaptive"
    config: dict[str, Any] = {
        "method": METHOD,
        "model": drafter,
        **{of: getattr(shape, of) for of in sizes},
    }
    if not shape.adaptive:
        # At every batch: on a GPU the default schedule would lower it.
        config["num_speculative_tokens_per_batch_size"] = [[1, 1, shape.num_speculative_tokens]]
    return config
