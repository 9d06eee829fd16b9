# SPDX-License-Identifier: Apache-2.0
"""What stays changed in vLLM, in one file; docs/upstream.md says what would replace it.

vLLM calls `register` (entry point group `vllm.general_plugins`) in each of its processes. Eight of
vLLM's methods are wrapped, and act only where ReDrafter is asked for:

- `EngineArgs.create_engine_config`: recognise the request, validate, choose our worker. vLLM's
  `method="custom_class"` passes no hidden states and verifies chains (RFC #36219).
- `SamplingParams._validate_spec_decode`: min-p and logit bias are allowed, as our sampler applies
  them; a request's own options are checked.
- `VllmConfig._get_v2_model_runner_unsupported_features`: it names all custom proposers (#36219).
- `VllmConfig.__post_init__`: async scheduling is allowed by a list of methods.
- `VllmConfig._maybe_disable_dynamic_sd_for_v1` (from 0.33): so is K by batch size.
- `AsyncLLM.__init__`: adds our stat logger to its argument `stat_loggers`.
- `InputProcessor.process_inputs`: a request whose input comes in pieces gets no drafts, as vLLM's
  synchronous scheduler keeps accepted tokens behind a stop. And a request takes its `cache_salt`
  with it: workers keep apart the answers of different ones.
- `EngineCore.reset_prefix_cache`: workers forget earlier answers too.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, get_args

from vllm_redrafter.checkpoints.fit import misfits, require_fit
from vllm_redrafter.checkpoints.speculation import NODES
from vllm_redrafter.engine import published
from vllm_redrafter.engine.chains import ANNOUNCEMENT, NODES_WITH_STATES, as_chain
from vllm_redrafter.engine.draft import DRAFT, NEEDS_GPU
from vllm_redrafter.engine.refusals import REMEDY_CHAIN
from vllm_redrafter.engine.request_options import FLAT_KEY, SALT_KEY, check_request
from vllm_redrafter.engine.selection import Engine, engine_here
from vllm_redrafter.engine.speculative_config import OF_DRAFTER, PASSED_ON, request_of, validated
from vllm_redrafter.heads.head import HeadConfig
from vllm_redrafter.heads.target_layers import missing_layers
from vllm_redrafter.utils import names
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import check_no_pattern
from vllm_redrafter.utils.names import METHOD
from vllm_redrafter.utils.patching import patched

MARK = "redrafter_worker"
"""Attribute of a SpeculativeConfig that is ours: the worker's path."""

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs


def register() -> None:
    """Wrap vLLM; called once per process, or more often, with the same result."""
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    _wrap(EngineArgs, "create_engine_config", _create_engine_config)
    _wrap(SamplingParams, "_validate_spec_decode", _validate_spec_decode)
    _wrap(VllmConfig, "_get_v2_model_runner_unsupported_features", _unsupported_by_v2)
    _wrap(VllmConfig, "__post_init__", _post_init)
    _wrap(VllmConfig, "_maybe_disable_dynamic_sd_for_v1", _disable_dynamic_k)
    # Where an engine's core runs it is imported by now; elsewhere that would take long.
    if core := sys.modules.get("vllm.v1.engine.core"):
        _wrap(core.EngineCore, "reset_prefix_cache", _reset_prefix_cache)


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name, None)
    # Some versions lack a method.
    if original is None or getattr(original, "_redrafter", False):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped._redrafter = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


# EngineArgs.create_engine_config


def _create_engine_config(
    original: Callable[..., VllmConfig], args: EngineArgs, *rest: Any, **kwargs: Any
) -> VllmConfig:
    request = request_of(args)
    if request is None:
        return original(args, *rest, **kwargs)
    requested, of_target = request.given, request.of_target
    check_no_pattern(of_target.get("model", args.model))

    @functools.cache
    def target() -> ModelConfig:
        with patched(args, **of_target):
            return args.create_model_config()

    config, checkpoint = validated(
        request, lambda: NODES_WITH_STATES if target().is_hybrid else None
    )
    drafter = None if checkpoint is None else checkpoint.head
    engine, draft = engine_here(), requested.get(DRAFT)
    if draft is not None and not engine.is_v2:
        raise ConfigError(NEEDS_GPU)
    _check_arguments(args, engine)
    asked = ["the speculative config asks for them"] * (config.tree == "chain")
    if reasons := asked or list(engine.chain_reasons(target())):
        config = as_chain(config)
    else:
        _check_backend(args, engine)
    settings = {
        "model": requested.get("model"),
        "revision": requested.get("revision"),
        **vars(config),
        "own_graph_sizes": _sets_graph_sizes(args),
        "target_layers": (list(drafter.target_layers) or None) if drafter else None,
        "draft": draft and draft["method"],
    }
    changed = {
        "speculative_config": {
            **(draft or {"method": "custom_class", "model": engine.proposer}),
            **{key: requested[key] for key in PASSED_ON if key in requested},
            NODES: config.num_speculative_tokens if draft is None else draft[NODES],
        },
        "spec_method": None,
        "spec_model": None,
        "spec_tokens": None,
        "additional_config": {**args.additional_config, METHOD: settings},
        "worker_cls": engine.worker,
        **({} if reasons else engine.tree_arguments),
        **of_target,
    }
    create = functools.partial(
        _create_speculative_config, args.create_speculative_config, config.num_speculative_tokens
    )
    # From Python 3.14 on a class hands a bare partial `self`, which `create` has.
    static = staticmethod(create)
    told = patched(type(args), create_speculative_config=static) if draft else nullcontext()
    # The caller may make another engine from these arguments.
    with patched(args, **changed), told:
        vllm_config = original(args, *rest, **kwargs)
    _check_target(vllm_config, drafter, engine)
    # Read by `_validate_spec_decode`.
    object.__setattr__(vllm_config.speculative_config, MARK, engine.worker)
    _announce(settings, drafter, draft)
    if reasons:
        _logger().info(ANNOUNCEMENT, "; ".join(reasons))
    parallel = vllm_config.parallel_config
    # Only here is it settled: vLLM's CPU platform makes "mp" of "uni".
    if engine.executor is not None and parallel.distributed_executor_backend == "mp":
        parallel.distributed_executor_backend = engine.executor
    engine.apply_default_schedule(vllm_config)
    _watch_counters(args, vllm_config)
    # Here, as they take long to import, and workers do not need them.
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor

    _wrap(EngineCore, "reset_prefix_cache", _reset_prefix_cache)
    _wrap(InputProcessor, "process_inputs", _process_inputs)
    return vllm_config


def _create_speculative_config(
    original: Callable[..., SpeculativeConfig], nodes: int, *args: Any, **kwargs: Any
) -> SpeculativeConfig:
    """As vLLM does, which checks how far its drafter can draft; then it is told of the nodes."""
    try:
        config = original(*args, **kwargs)
    except (NotImplementedError, ZeroDivisionError) as error:  # it has none, or no MTP layer
        raise ConfigError(
            "speculative config: vLLM finds no drafter for this 'draft' (MTP layers are the "
            "target's own, where it has any): leave it out to verify continuations that are "
            "found in the text"
        ) from error
    object.__setattr__(config, NODES, nodes)
    return config


def _sets_graph_sizes(args: EngineArgs) -> bool:
    places = args, args.compilation_config
    keys = "cudagraph_capture_sizes", "max_cudagraph_capture_size"
    return any(getattr(place, key) is not None for place in places for key in keys)


def _logger() -> Any:
    from vllm_redrafter.engine.log import logger

    return logger


def _announce(
    settings: Mapping[str, Any], drafter: HeadConfig | None, draft: Mapping[str, Any] | None
) -> None:
    unused = [] if drafter or draft else [key for key in OF_DRAFTER if settings[key] != "chain"]
    described = ", ".join(
        f"{key}={value!r}"
        for key, value in settings.items()
        if value is not None and key not in unused
    )
    source = "continuations found in the text alone" if unused else "ReDrafter"
    if draft is not None:
        source = f"vLLM's {draft['method']} {draft.get('model') or 'layers'}"
    _logger().info("Speculating with %s: %s", source, described)
    if drafter is not None and drafter.advice is not None:
        _logger().info("ReDrafter: %s", drafter.advice)


def _check_arguments(args: EngineArgs, engine: Engine) -> None:
    if args.worker_cls not in ("auto", engine.worker):
        raise ConfigError(
            f"ReDrafter brings its own worker; worker_cls={args.worker_cls!r} cannot be combined "
            "with it: leave it out"
        )


def _check_backend(args: EngineArgs, engine: Engine) -> None:
    attention = args.attention_config
    requested = args.attention_backend or attention.backend or attention.backend_per_kind
    if engine.is_v2 and requested:
        raise ConfigError(
            f"the attention backend {requested} cannot verify token trees, ReDrafter brings its "
            f"own: leave --attention-backend out, {REMEDY_CHAIN}"
        )


def _check_target(vllm_config: VllmConfig, drafter: HeadConfig | None, engine: Engine) -> None:
    model = vllm_config.model_config
    if drafter is not None:
        reasons = [*misfits(drafter, model.get_hidden_size(), model.get_vocab_size())]
        num_layers = model.get_total_num_hidden_layers()
        if missing := missing_layers(drafter.target_layers, num_layers):
            reasons.append(missing)
        require_fit("the drafter", model.model, reasons)
    for reason in engine.refusals(vllm_config):
        raise ConfigError(f"ReDrafter cannot speculate for {model.model!r}: {reason}")


# AsyncLLM


def _watch_counters(args: EngineArgs, vllm_config: VllmConfig) -> None:
    """Prepare for a server's front end, here or in processes that are launched from here."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    if not isinstance(args, AsyncEngineArgs) or not _speculates(vllm_config):
        return
    if args._api_process_rank == -1:
        # This process launches engines and API servers; the latter come by here themselves.
        published.open_directory()
        return
    from vllm.v1.engine.async_llm import AsyncLLM

    _wrap(AsyncLLM, "__init__", start_front_end)


def _speculates(vllm_config: VllmConfig) -> bool:
    return vllm_config.parallel_config.worker_cls in names.WORKERS


def start_front_end(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """`AsyncLLM.__init__` with our stat logger, where a ReDrafter speculates and is counted."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    given = bound.arguments
    # Of several API servers the first counts for all, as the counters are the whole engine's.
    is_first = given.get("client_index", 0) == 0
    if not (_speculates(given["vllm_config"]) and given["log_stats"] and is_first):
        return original(*args, **kwargs)
    from vllm_redrafter.engine.stat_logger import ReDrafterStatLogger

    if not given.get("client_addresses"):  # the engines are launched from here
        published.open_directory()
    given["stat_loggers"] = [*(given.get("stat_loggers") or ()), ReDrafterStatLogger]
    try:
        return original(*bound.args, **bound.kwargs)
    finally:
        published.close_directory()


# InputProcessor.process_inputs


def _process_inputs(original: Callable[..., Any], processor: Any, *args: Any, **kwargs: Any) -> Any:
    request = original(processor, *args, **kwargs)
    params = request.sampling_params
    if params is None or not _speculates(processor.vllm_config):
        return request
    options = {}
    if request.resumable:
        _logger().warning_once(
            "Requests whose input comes in pieces (streaming input) are decoded without drafts"
        )
        options[FLAT_KEY] = 0
    if request.cache_salt is not None:
        options[SALT_KEY] = request.cache_salt
    if options:
        params.extra_args = {**(params.extra_args or {}), **options}
    return request


# EngineCore.reset_prefix_cache


def _reset_prefix_cache(
    original: Callable[..., bool], core: Any, *args: Any, **kwargs: Any
) -> bool:
    if _speculates(core.vllm_config):
        core.model_executor.collective_rpc("reset_earlier_answers")
    return original(core, *args, **kwargs)


# VllmConfig


def _unsupported_by_v2(
    original: Callable[[VllmConfig], list[str]], vllm_config: VllmConfig
) -> list[str]:
    features = original(vllm_config)
    worker = vllm_config.parallel_config.worker_cls
    if vllm_config.speculative_config is None or worker != names.V2_WORKER:
        return features
    return [f for f in features if f != "speculative method 'custom_class'"]


def _post_init(original: Callable[[VllmConfig], None], vllm_config: VllmConfig) -> None:
    if not _speculates(vllm_config):
        return original(vllm_config)
    from vllm.config import vllm as module

    methods = Literal[(*get_args(module.EagleModelTypes), "custom_class")]  # type: ignore[valid-type]
    with patched(module, EagleModelTypes=methods):
        return original(vllm_config)


def _disable_dynamic_k(original: Callable[[VllmConfig], None], vllm_config: VllmConfig) -> None:
    if vllm_config.parallel_config.worker_cls != names.CPU_WORKER:
        original(vllm_config)


# SamplingParams._validate_spec_decode


def _validate_spec_decode(
    original: Callable[..., None], params: Any, speculative_config: SpeculativeConfig | None
) -> None:
    worker = getattr(speculative_config, MARK, None)
    if speculative_config is None or worker is None:
        return original(params, speculative_config)
    from vllm.exceptions import VLLMValidationError

    try:
        check_request(params.extra_args, speculative_config.num_speculative_tokens)
    except ConfigError as error:
        raise VLLMValidationError(str(error), parameter="extra_args") from error
    if worker == names.V2_WORKER:
        return None
    if getattr(params, "thinking_token_budget", None) is not None:
        raise VLLMValidationError(
            "thinking_token_budget is not supported with ReDrafter",
            parameter="thinking_token_budget",
            value=params.thinking_token_budget,
        )
    return None
