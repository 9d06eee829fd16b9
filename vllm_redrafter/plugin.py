"""Everything that is changed in vLLM, in one file.

vLLM calls `register` (entry point group `vllm.general_plugins`) in each of its processes. Five of
vLLM's methods are wrapped, and act only where a ReDrafter checkpoint is the speculative model:

- `EngineArgs.create_engine_config`: recognise the checkpoint, validate, choose our worker.
  vLLM's own plug-in for proposers (`method="custom_class"`) passes no hidden states and verifies
  chains; this wrap can go when vLLM lets a plug-in register a speculative method (RFC #36219).
- `SamplingParams._validate_spec_decode`: vLLM refuses min-p and logit bias when it speculates;
  our sampler applies them. It can go when vLLM asks the method what it supports.
- `VllmConfig._get_v2_model_runner_unsupported_features`: it names all custom proposers, since Model
  Runner V2 cannot make them; our runner makes its own. It can go with RFC #36219.
- `VllmConfig.__post_init__`: async scheduling is allowed by a list of methods; ours keeps its
  drafts on the device like those. It can go with vLLM 0.32: 0.33 asks the V1 runner only.
- `VllmConfig._maybe_disable_dynamic_sd_for_v1` (from 0.33): K by batch size is allowed to the V1
  runner by a list of methods; our proposer drafts as many nodes as the step asks for. It can go
  when vLLM asks the method what it supports.

`substituted` serves our worker, where vLLM looks a class up in a module instead of taking it as
an argument; what it replaces is put back at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from vllm_redrafter.checkpoints.files import read_config
from vllm_redrafter.checkpoints.fit import size_differences
from vllm_redrafter.checkpoints.reading import check_checkpoint, is_redrafter
from vllm_redrafter.config import DrafterConfig, ReDrafterConfig
from vllm_redrafter.errors import ConfigError
from vllm_redrafter.names import MODEL_TYPE

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

METHOD = "redrafter"
"""May be given as the speculative config's `method`, to insist on a ReDrafter checkpoint."""

SUPPORTED_VLLM = ("0.32", "0.33")
CPU_WORKER = "vllm_redrafter.engine.cpu.worker.ReDrafterCPUWorker"
CPU_PROPOSER = "vllm_redrafter.engine.cpu.proposer.TreeProposer"
V2_WORKER = "vllm_redrafter.engine.v2.worker.ReDrafterWorker"
V2_INTERPRETED_WORKER = "vllm_redrafter.engine.v2.interpreted_worker.InterpretedWorker"
V2_SPECULATOR = "vllm_redrafter.engine.v2.speculator.TreeSpeculator"
TREE_ATTENTION = "vllm_redrafter.engine.v2.attention.TreeAttentionBackend"

VLLM_KEYS = ("method", "model", "revision", "num_speculative_tokens")
"""Keys of vLLM's speculative config that mean something here, besides our own."""
PASSED_ON = ("num_speculative_tokens", "num_speculative_tokens_per_batch_size")


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


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name, None)
    # vLLM 0.32 lacks a method, and other versions may lack more; speculating with a version that
    # is not supported is refused below in any case.
    if original is None or getattr(original, "_redrafter", False):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped._redrafter = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


@contextmanager
def substituted(module: Any, name: str, replacement: Any) -> Iterator[None]:
    """`module.name` is `replacement` while the body runs."""
    original = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)


# EngineArgs.create_engine_config


def _create_engine_config(
    original: Callable[..., VllmConfig], args: EngineArgs, *rest: Any, **kwargs: Any
) -> VllmConfig:
    requested = _requested(args)
    if not _is_ours(requested):
        return original(args, *rest, **kwargs)
    config, drafter = _validated(requested)
    _check_version()
    engine = _engine()
    _check_arguments(args, engine)
    settings = {
        "model": requested["model"],
        "revision": requested.get("revision"),
        **vars(config),
    }
    changed = {
        "speculative_config": {
            "method": "custom_class",
            "model": engine.proposer,
            **{key: requested[key] for key in PASSED_ON if key in requested},
        },
        "spec_method": None,
        "spec_model": None,
        "spec_tokens": None,
        "additional_config": {**args.additional_config, METHOD: settings},
        "worker_cls": engine.worker,
        **engine.arguments,
    }
    before = {name: getattr(args, name) for name in changed}
    _set_all(args, changed)
    try:
        vllm_config = original(args, *rest, **kwargs)
    finally:
        # The caller's arguments stay as they were: an engine may be made from them again.
        _set_all(args, before)
    _check_target(vllm_config, drafter, engine)
    _announce(settings)
    return vllm_config


def _announce(settings: Mapping[str, Any]) -> None:
    from vllm.logger import init_logger

    described = ", ".join(
        f"{key}={value!r}" for key, value in settings.items() if value is not None
    )
    init_logger("vllm.redrafter").info("Speculating with ReDrafter: %s", described)


def _set_all(owner: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def _requested(args: EngineArgs) -> dict[str, Any]:
    """The speculative config, wherever it was given: as a dict, or as --spec-* flags."""
    requested = {key.replace("-", "_"): v for key, v in (args.speculative_config or {}).items()}
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


def _is_ours(requested: Mapping[str, Any]) -> bool:
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


def _validated(requested: Mapping[str, Any]) -> tuple[ReDrafterConfig, DrafterConfig]:
    known = {*VLLM_KEYS, *PASSED_ON, *_own_keys()}
    if unknown := sorted(set(requested) - known):
        raise ConfigError(
            f"speculative config: unknown key(s) {', '.join(unknown)} for a ReDrafter; "
            f"known are {', '.join(sorted(known))}"
        )
    if not isinstance(requested.get("model"), str):
        raise ConfigError(
            "speculative config: 'model' must name the ReDrafter checkpoint (folder or hub id)"
        )
    if "num_speculative_tokens" not in requested:
        raise ConfigError(
            "speculative config: num_speculative_tokens (--spec-tokens) is missing: the most "
            "tree nodes verified per request and step, between 1 and 127"
        )
    shape = {key: requested[key] for key in _own_keys() if key in requested}
    config = ReDrafterConfig(requested["num_speculative_tokens"], **shape)
    return config, check_checkpoint(requested["model"], requested.get("revision"))


def _check_version() -> None:
    import vllm

    version = vllm.__version__
    if not version.startswith(tuple(f"{v}." for v in SUPPORTED_VLLM)):
        raise ConfigError(
            f"vLLM {version} is not supported by this version of vllm-redrafter, which knows "
            f"{', '.join(f'{v}.x' for v in SUPPORTED_VLLM)}: install one of these"
        )


@dataclass(frozen=True)
class Engine:
    """One of our adapters to vLLM: what it is named by in vLLM's configuration.

    Attributes:
        worker: path of the worker class.
        proposer: path of the class that drafts.
        is_v2: it runs on Model Runner V2 and brings its own attention backend.
        arguments: further engine arguments that it needs.
    """

    worker: str
    proposer: str
    is_v2: bool
    arguments: Mapping[str, Any] = field(default_factory=dict)


def _engine() -> Engine:
    """The engine for this platform.

    Raises:
        ConfigError: there is none.
    """
    from vllm import envs
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # The CUDA engine under Triton's interpreter: made for tests.
        if envs.VLLM_USE_V2_MODEL_RUNNER:
            return Engine(V2_INTERPRETED_WORKER, V2_SPECULATOR, is_v2=True)
        return Engine(CPU_WORKER, CPU_PROPOSER, is_v2=False)
    if current_platform.is_cuda():
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CUSTOM, TREE_ATTENTION)
        arguments = {"attention_backend": AttentionBackendEnum.CUSTOM}
        return Engine(V2_WORKER, V2_SPECULATOR, is_v2=True, arguments=arguments)
    raise ConfigError(
        f"ReDrafter runs on CUDA and on vLLM's CPU backend, not on {current_platform.device_type}: "
        "leave the speculative config out"
    )


def _check_arguments(args: EngineArgs, engine: Engine) -> None:
    if args.worker_cls not in ("auto", engine.worker):
        raise ConfigError(
            f"ReDrafter brings its own worker; worker_cls={args.worker_cls!r} cannot be combined "
            "with it: leave it out"
        )
    attention = args.attention_config
    requested = args.attention_backend or attention.backend or attention.backend_per_kind
    if engine.is_v2 and requested:
        raise ConfigError(
            f"the attention backend {requested} cannot verify token trees, ReDrafter brings its "
            "own: leave --attention-backend out"
        )


def _check_target(vllm_config: VllmConfig, drafter: DrafterConfig, engine: Engine) -> None:
    """Refuse what cannot work before any process starts."""
    model = vllm_config.model_config
    for size in size_differences(drafter, model.get_hidden_size(), model.get_vocab_size()):
        raise ConfigError(
            f"the drafter's {size.what} is {size.drafter}, that of the target {model.model!r} is "
            f"{size.target}: use the drafter that was trained for this target"
        )
    unsupported_here = _unsupported_by_our_v2 if engine.is_v2 else _unsupported_by_our_cpu
    for reason in (*_unsupported(vllm_config), *unsupported_here(vllm_config)):
        raise ConfigError(f"ReDrafter cannot speculate for {model.model!r}: {reason}")


def _unsupported(vllm_config: VllmConfig) -> Iterator[str]:
    """Why neither engine can run this configuration."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model.runner_type == "pooling":
        yield "it is a pooling model, which does not generate; leave the speculative config out"
    if model.is_encoder_decoder:
        yield "encoder-decoder models are not supported"
    if model.use_mla:
        yield "multi-head latent attention (MLA) is not supported"
    if model.is_hybrid or model.is_attention_free:
        yield "models with Mamba or linear-attention layers keep a state that no tree can share"
    if model.uses_mrope:
        yield "multi-dimensional RoPE positions (M-RoPE) are not supported"
    if vllm_config.kv_transfer_config is not None:
        yield (
            "a KV connector would ship the cache before accepted rows are compacted; leave "
            "--kv-transfer-config out"
        )
    for name in (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        if (size := getattr(parallel, name, 1)) > 1:
            yield f"{name} is {size}, it must be 1"


def _unsupported_by_our_cpu(vllm_config: VllmConfig) -> Iterator[str]:
    model = vllm_config.model_config
    if (size := vllm_config.parallel_config.tensor_parallel_size) > 1:
        yield f"tensor_parallel_size is {size}; on the CPU backend it must be 1"
    if str(vllm_config.cache_config.cache_dtype).startswith("fp8"):
        yield (
            f"kv_cache_dtype {vllm_config.cache_config.cache_dtype!r} is not supported on the CPU "
            "backend; leave it at 'auto'"
        )
    if model.use_fp64_gumbel:
        yield "use_fp64_gumbel is not supported; leave --use-fp64-gumbel out"
    if model.logits_processors:
        yield "custom logits processors are not supported with speculation; leave them out"


def _unsupported_by_our_v2(vllm_config: VllmConfig) -> Iterator[str]:
    from vllm.platforms import current_platform

    from vllm_redrafter.triton_kernels.tree_attention_arguments import HEAD_DIMS

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if not vllm_config.use_v2_model_runner:
        yield "it needs Model Runner V2; unset VLLM_USE_V2_MODEL_RUNNER"
    if (head_size := model.get_head_size()) not in HEAD_DIMS:
        yield f"its head size is {head_size}; tree attention knows {HEAD_DIMS}"
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    same = str(model.dtype).removeprefix("torch.")
    if cache_dtype not in ("auto", same, "fp8", "fp8_e4m3"):
        yield f"kv_cache_dtype is {cache_dtype!r}; use 'auto', {same!r} or 'fp8'"
    older_gpu = current_platform.is_cuda() and not current_platform.has_device_capability(89)
    if cache_dtype.startswith("fp8") and older_gpu:
        capability = current_platform.get_device_capability()
        yield (
            f"kv_cache_dtype is {cache_dtype!r}, which GPUs convert from compute capability 8.9 "
            f"on, and this one has {capability.as_version_str() if capability else 'none'}; use "
            "'auto'"
        )
    refused = {
        "with LoRA adapters vLLM's Model Runner V2 expects one row of logits per request; leave "
        "--enable-lora out": vllm_config.lora_config is not None,
        "dual batch overlap is not supported; leave --enable-dbo out": parallel.use_ubatching,
        "batch-sharded sampling is not supported; leave --enable-batch-sharded-sampling out": (
            parallel.enable_batch_sharded_sampling
        ),
        "watermarking is not supported; leave --watermark-config out": (
            getattr(vllm_config, "watermark_config", None) is not None
        ),
        "trace replay is not supported; leave --enable-trace-replay out": (
            model.enable_trace_replay
        ),
        "sampling masks are not returned; leave --return-sampling-mask out": (
            model.return_sampling_mask
        ),
        "KV-sharing fast prefill is not supported; leave --kv-sharing-fast-prefill out": (
            vllm_config.cache_config.kv_sharing_fast_prefill
        ),
        "reference sliding-window attention is not supported": model.rswa_window is not None,
        "PrefixLM attention is not supported": model.is_mm_prefix_lm,
    }
    yield from (reason for reason, applies in refused.items() if applies)


# VllmConfig


def _is_v2(vllm_config: VllmConfig) -> bool:
    ours = (V2_WORKER, V2_INTERPRETED_WORKER)
    return (
        vllm_config.speculative_config is not None
        and vllm_config.parallel_config.worker_cls in ours
    )


def _unsupported_by_v2(
    original: Callable[[VllmConfig], list[str]], vllm_config: VllmConfig
) -> list[str]:
    features = original(vllm_config)
    if not _is_v2(vllm_config):
        return features
    return [f for f in features if f != "speculative method 'custom_class'"]


def _post_init(original: Callable[[VllmConfig], None], vllm_config: VllmConfig) -> None:
    if not _is_v2(vllm_config):
        return original(vllm_config)
    from vllm.config import vllm as module

    methods = Literal[(*get_args(module.EagleModelTypes), "custom_class")]  # type: ignore[valid-type]
    with substituted(module, "EagleModelTypes", methods):
        return original(vllm_config)


def _disable_dynamic_k(original: Callable[[VllmConfig], None], vllm_config: VllmConfig) -> None:
    if vllm_config.parallel_config.worker_cls != CPU_WORKER:
        original(vllm_config)


# SamplingParams._validate_spec_decode


def _validate_spec_decode(
    original: Callable[..., None], params: Any, speculative_config: SpeculativeConfig | None
) -> None:
    if speculative_config is None or speculative_config.model not in (CPU_PROPOSER, V2_SPECULATOR):
        return original(params, speculative_config)
    if speculative_config.model == V2_SPECULATOR:
        return None
    if getattr(params, "thinking_token_budget", None) is not None:
        from vllm.exceptions import VLLMValidationError

        raise VLLMValidationError(
            "thinking_token_budget is not supported with ReDrafter",
            parameter="thinking_token_budget",
            value=params.thinking_token_budget,
        )
    return None


__all__ = ["METHOD", "MODEL_TYPE", "register", "substituted"]
