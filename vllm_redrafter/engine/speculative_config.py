# SPDX-License-Identifier: Apache-2.0
"""What was asked of vLLM: to speculate with a ReDrafter.

A checkpoint is named by `--spec-model`, by the speculative config's `model`, or alone, in place of
the target: `vllm serve DRAFTER`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_redrafter.checkpoints.drafter_files import read_config
from vllm_redrafter.checkpoints.reading import Checkpoint, is_drafter, verifier_of
from vllm_redrafter.checkpoints.shipped import PREFIX
from vllm_redrafter.checkpoints.speculation import NODES, speculation
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.engine.draft import DRAFT, shape_of_draft
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.names import METHOD

VLLM_KEYS = ("method", "model", "revision", "num_speculative_tokens")
"""Keys of vLLM's speculative config that mean something here, besides our own."""
PASSED_ON = ("num_speculative_tokens_per_batch_size",)
OF_DRAFTER = ("revision", "beam_width", "beam_length", "tree", "candidates")
"""Keys that mean something only where there is a drafter, but for "chain" of a tree."""


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        given: the speculative config, with what flags say.
        checkpoint: the drafter's, where it has been opened.
        of_target: the engine's arguments for the target of a drafter that was named alone.
    """

    given: Mapping[str, Any]
    checkpoint: Checkpoint | None = None
    of_target: Mapping[str, Any] = field(default_factory=dict)


def request_of(args: Any) -> Request | None:
    """What vLLM's EngineArgs ask for; None where it is not for a ReDrafter.

    ConfigError: something is given twice, or the target of a drafter named alone is missing.
    """
    given = _given_to(args)
    moved = given.pop("target", None)
    is_free = "model" not in given and given.get("method") in (None, METHOD)
    if is_free and (alone := _drafter_at(args.model, args.revision)) is not None:
        target = _target_of(alone, moved)
        given |= {"model": args.model, "revision": args.revision}
        of_target = {"model": target, "tokenizer": args.tokenizer or target, "revision": None}
        return Request(given, alone, of_target)
    if moved is not None:
        raise ConfigError(
            f"speculative config: 'target' ({moved!r}) is for a drafter that is served by its own "
            f"name; here the model, {args.model!r}, is the target: leave it out"
        )
    return _request_for(given)


def _request_for(given: Mapping[str, Any]) -> Request | None:
    """The same of a speculative config: ours by its method, our own keys, or the checkpoint."""
    method, model = given.get("method"), given.get("model")
    keys = ReDrafterConfig.own_keys()
    if method == METHOD or DRAFT in given or (method is None and any(key in given for key in keys)):
        return Request(given)
    if method is not None or not isinstance(model, str):
        return None
    try:
        values = read_config(model, given.get("revision"))
    except ConfigError:
        # A path is ours to refuse; a name may be one of vLLM's own ("ngram", a class path).
        if "/" in model or model.startswith(PREFIX):
            raise
        return None
    if not is_drafter(values):
        return None
    return Request(given, Checkpoint.of(model, given.get("revision"), values))


def _drafter_at(model: str, revision: str | None) -> Checkpoint | None:
    """The drafter that stands in the target's place; None for a target."""
    try:
        values = {} if "://" in model else read_config(model, revision)
    except ConfigError:  # vLLM knows more kinds of models, and says what is wrong with them
        return None
    return Checkpoint.of(model, revision, values) if is_drafter(values) else None


def _target_of(drafter: Checkpoint, moved: Any) -> str:
    """The target of a drafter that is named alone: where it is now, or where it was."""
    target = moved or verifier_of(drafter.values)
    remedy = (
        f"name the target, as in vllm serve TARGET --spec-model {drafter.model}, or in the "
        'speculative config, as in --speculative-config \'{"target": "TARGET"}\''
    )
    if target is not None and not isinstance(target, str):
        raise ConfigError(f"speculative config: 'target' must be a name, got {target!r}: {remedy}")
    if target is None:
        raise ConfigError(
            f"the drafter {drafter.model!r} does not say for which target it is: {remedy}"
        )
    try:
        read_config(target, what="target")
    except ConfigError as error:
        raise ConfigError(
            f"the drafter {drafter.model!r} is for the target {target!r}, which is not within "
            f"reach: {remedy}"
        ) from error
    return target


def _given_to(args: Any) -> dict[str, Any]:
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


def validated(
    request: Request, default_max_nodes: Callable[[], int | None] = lambda: None
) -> tuple[ReDrafterConfig, Checkpoint | None]:
    """How to speculate, by default as the checkpoint says; and the drafter's checkpoint.

    Without a checkpoint (None), `draft` is vLLM's own, or only prompt-lookup (n-gram) matches are
    verified.

    Args:
        default_max_nodes: K where none is given; None for the checkpoint's. Called when needed.

    ConfigError: unknown keys, values out of range, a checkpoint that cannot be served.
    """
    requested = request.given
    known = {*VLLM_KEYS, *PASSED_ON, DRAFT, *ReDrafterConfig.own_keys()}
    if unknown := sorted(set(requested) - known):
        raise ConfigError(
            f"speculative config: unknown key(s) {', '.join(unknown)} for a ReDrafter; "
            f"known are {', '.join(sorted(known))}"
        )
    keys = (NODES, *ReDrafterConfig.own_keys())
    shape = {key: requested[key] for key in keys if key in requested}
    if DRAFT in requested:
        return ReDrafterConfig(**shape, **shape_of_draft(requested)), None
    if requested.get("model") is None:
        meant = {"tree"} if requested.get("tree") == "chain" else set()
        if useless := [key for key in OF_DRAFTER if key in requested.keys() - meant]:
            raise ConfigError(
                f"speculative config: {', '.join(useless)} without a drafter: name a drafter with "
                "'model' (--spec-model), or leave this out to verify only continuations found in "
                "the text"
            )
        return speculation(None, shape, default_max_nodes), None
    named = {
        "model": "the ReDrafter checkpoint (folder or hub id)",
        "revision": "a branch, tag or commit",
    }
    for key, what in named.items():
        if not isinstance(value := requested.get(key), str | None):
            raise ConfigError(f"speculative config: {key!r} must name {what}, got {value!r}")
    checkpoint = request.checkpoint
    if checkpoint is None:
        checkpoint = Checkpoint.open(requested["model"], requested.get("revision"))
    return speculation(checkpoint, shape, default_max_nodes), checkpoint.checked()
