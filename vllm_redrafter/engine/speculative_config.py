"""What was asked of vLLM: to speculate with a ReDrafter, in whichever of its ways.

A checkpoint is named by `--spec-model`, by the speculative config's `model`, or alone, in place of
the target: `vllm serve DRAFTER`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vllm_redrafter.checkpoints.drafter_files import CONFIG_FILE, read_config, resolve_file
from vllm_redrafter.checkpoints.reading import (
    SHAPE_KEYS,
    check_checkpoint,
    is_redrafter,
    shape_of,
    verifier_of,
)
from vllm_redrafter.config import USUAL_CANDIDATES, ReDrafterConfig
from vllm_redrafter.heads.head import HeadConfig
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.names import METHOD

VLLM_KEYS = ("method", "model", "revision", "num_speculative_tokens")
"""Keys of vLLM's speculative config that mean something here, besides our own."""
PASSED_ON = ("num_speculative_tokens_per_batch_size",)
NODES = "num_speculative_tokens"
OF_DRAFTER = ("revision", "beam_width", "beam_length", "tree", "candidates")
"""Keys that mean something only where there is a drafter."""


def requested_of(args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is asked for.

    Args:
        args: vLLM's EngineArgs.

    Returns:
        (the speculative config, wherever it was given; arguments of the engine that it entails:
        none, but for a drafter that was named alone).

    Raises:
        ConfigError: something is said twice; a drafter that is named alone has no target that is
            within reach.
    """
    requested = _requested(args)
    moved = requested.pop("target", None)
    if "model" not in requested and _is_drafter(args.model, args.revision):
        target = _target_of(args, moved)
        requested |= {"model": args.model, "revision": args.revision}
        return requested, {
            "model": target,
            "tokenizer": args.tokenizer or target,
            "revision": None,
        }
    if moved is not None:
        raise ConfigError(
            f"speculative config: 'target' ({moved!r}) is for a drafter that is served by its own "
            f"name; here the model, {args.model!r}, is the target: leave it out"
        )
    return requested, {}


def _target_of(args: Any, moved: str | None) -> str:
    """The target of a drafter that is named alone: where it is now, or where it was."""
    target = moved or verifier_of(read_config(args.model, args.revision))
    remedy = (
        f"name the target, as in vllm serve TARGET --spec-model {args.model}, or in the "
        'speculative config, as in --speculative-config \'{"target": "TARGET"}\''
    )
    if target is not None and not isinstance(target, str):
        raise ConfigError(f"speculative config: 'target' must be a name, got {target!r}: {remedy}")
    if target is None:
        raise ConfigError(
            f"the drafter {args.model!r} does not say for which target it is: {remedy}"
        )
    try:
        read_config(target, what="target")
    except ConfigError as error:
        raise ConfigError(
            f"the drafter {args.model!r} is for the target {target!r}, which is not within reach: "
            f"{remedy}"
        ) from error
    return target


def _is_drafter(model: str, revision: str | None) -> bool:
    try:
        return "://" not in model and is_redrafter(read_config(model, revision))
    except ConfigError:  # vLLM knows more kinds of models, and says what is wrong with them
        return False


def _requested(args: Any) -> dict[str, Any]:
    """The speculative config, wherever it was given: as a dict, or as --spec-* flags."""
    given = args.speculative_config or {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            "the speculative config must be an object, as in "
            f'\'{{"model": "DRAFTER", "num_speculative_tokens": 12}}\', got {given!r}'
        )
    requested = {str(key).replace("-", "_"): value for key, value in given.items()}
    flags = {
        "method": args.spec_method,
        "model": args.spec_model,
        "num_speculative_tokens": args.spec_tokens,
    }
    for key, value in flags.items():
        if value is not None:
            if key in requested:
                raise ConfigError(
                    f"{key!r} is given both as a flag ({value!r}) and in the speculative config "
                    f"({requested[key]!r}); leave one out"
                )
            requested[key] = value
    return requested


def is_ours(requested: Mapping[str, Any]) -> bool:
    """Is this a request for ReDrafter? Explicitly, by our own keys, or by the checkpoint."""
    method, model = requested.get("method"), requested.get("model")
    if method == METHOD or (method is None and any(k in requested for k in _own_keys())):
        return True
    if method is not None or not isinstance(model, str):
        return False
    try:
        return is_redrafter(read_config(model, requested.get("revision")))
    except ConfigError:
        # Not a folder, and not to be had from the hub. A path is ours to refuse clearly; a name
        # may be one of vLLM's own ("ngram", a dotted class path), which says so itself.
        if "/" in model:
            raise
        return False


def _own_keys() -> tuple[str, ...]:
    return ReDrafterConfig.own_keys()


def validated(
    requested: Mapping[str, Any], usual_nodes: Callable[[], int | None] = lambda: None
) -> tuple[ReDrafterConfig, HeadConfig | None]:
    """How to speculate, what was not said taken from the checkpoint; and what the drafter is.

    Without a drafter (None), continuations found in a request's own text are all that is verified.

    Args:
        requested: the speculative config.
        usual_nodes: K at most, where nobody says it; None for the checkpoint's, whatever it is.
            Called where it is needed: it reads the target's configuration.

    Raises:
        ConfigError: unknown keys, values out of range, a checkpoint that cannot be served.
    """
    known = {*VLLM_KEYS, *PASSED_ON, *_own_keys()}
    if unknown := sorted(set(requested) - known):
        raise ConfigError(
            f"speculative config: unknown key(s) {', '.join(unknown)} for a ReDrafter; "
            f"known are {', '.join(sorted(known))}"
        )
    if requested.get("model") is None:
        return _without_drafter(requested, usual_nodes), None
    if not isinstance(requested["model"], str):
        raise ConfigError(
            "speculative config: 'model' must name the ReDrafter checkpoint (folder or hub id), "
            f"got {requested['model']!r}"
        )
    if not isinstance(requested.get("revision"), str | None):
        raise ConfigError(
            "speculative config: 'revision' must be the name of a branch, tag or commit, got "
            f"{requested['revision']!r}"
        )
    checkpoint = requested["model"], requested.get("revision")
    given = _given(requested)
    shape = _recorded_besides(given, *checkpoint) | given
    if NODES not in given and (most := usual_nodes()) is not None:
        shape[NODES] = min(shape.get(NODES, most), most)
    if NODES not in shape:
        raise ConfigError(
            "speculative config: num_speculative_tokens (--spec-tokens) is missing, and the "
            "checkpoint does not record it: the most tree nodes verified per request and step, "
            "between 1 and 127"
        )
    head = check_checkpoint(*checkpoint)
    if head.max_beam_length is not None and "beam_length" not in shape:
        shape["beam_length"] = min(ReDrafterConfig.beam_length, head.max_beam_length)
    usual = USUAL_CANDIDATES if head.selected_depths else 0
    recorded = usual if "candidates" in given else shape.pop("candidates", usual)
    config = ReDrafterConfig(**shape)
    # What nobody asked for shall not forbid drafts that are longer or wider than it is for.
    if "candidates" not in given and config.beam_length <= 1 + head.selected_depths:
        is_enough = not 0 < recorded < config.beam_width
        config = replace(config, candidates=recorded if is_enough else USUAL_CANDIDATES)
    head.require_beam_length("speculative config", config.beam_length)
    head.require_candidates("speculative config", config.candidates, config.beam_length)
    return config, head


def _without_drafter(
    requested: Mapping[str, Any], usual_nodes: Callable[[], int | None]
) -> ReDrafterConfig:
    remedy = "name a drafter with 'model' (--spec-model)"
    if useless := [key for key in OF_DRAFTER if key in requested]:
        raise ConfigError(
            f"speculative config: {', '.join(useless)} without a drafter: {remedy}, or leave "
            "this out to verify only continuations found in the text"
        )
    given = _given(requested)
    if NODES not in given and (most := usual_nodes()) is not None:
        given[NODES] = most
    if NODES not in given:
        raise ConfigError(
            "speculative config: num_speculative_tokens (--spec-tokens) is missing, and there is "
            "no drafter that records it: the most tree nodes verified per request and step, "
            "between 1 and 127"
        )
    config = ReDrafterConfig(**given)
    if not config.context_matches:
        raise ConfigError(
            "speculative config: without a drafter and with context_matches=0 there is nothing to "
            f"verify: {remedy}, or leave context_matches out"
        )
    return config


def _given(requested: Mapping[str, Any]) -> dict[str, Any]:
    keys = (NODES, *_own_keys())
    return {key: requested[key] for key in keys if key in requested}


def _recorded_besides(given: Mapping[str, Any], model: str, revision: str | None) -> dict[str, Any]:
    """What the checkpoint records and nobody has said. Checked here: the file is to be named."""
    recorded = shape_of(read_config(model, revision))
    needed = {key: value for key, value in recorded.items() if key not in given}
    for key, value in needed.items():
        try:
            ReDrafterConfig(**{"num_speculative_tokens": 1, key: value})
        except ConfigError as error:
            raise ConfigError(
                f"{resolve_file(model, CONFIG_FILE, revision)}: {SHAPE_KEYS[key]} in "
                f"proposal_methods cannot be served: {error}; give {key} yourself, or record "
                "another shape in the checkpoint with `vllm-redrafter evaluate --record`"
            ) from error
    return needed
