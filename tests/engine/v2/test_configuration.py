# SPDX-License-Identifier: Apache-2.0
"""What plugin.py makes of a configuration for Model Runner V2, and what it refuses."""

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config.aux_output import AuxOutputConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.config.lora import LoRAConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability, PlatformEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from redrafter_testing.gpu import cuda_engine_on_cpu
from redrafter_testing.models.families.without_trees import SIZES, FamilyWithoutTrees
from redrafter_testing.models.tiny_models import make_drafter
from redrafter_testing.models.vllm_drafters import Drafter
from vllm_redrafter import ConfigError, plugin
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.engine.selection import engine_here
from vllm_redrafter.engine.speculation import Settings
from vllm_redrafter.engine.v2 import speculator
from vllm_redrafter.engine.v2.refusals import adaptive_obstacles, chain_reasons, refusals
from vllm_redrafter.engine.v2.scheduler import TreeScheduler
from vllm_redrafter.utils import names

plugin.register()
EXPERTS_RETURNED = AuxOutputConfig(enable_return_routed_experts=True)
PLATFORM = type(current_platform)
GLM = "Glm4MoeForCausalLM", "glm4_moe"
GEMMA = "Gemma4AssistantForCausalLM", "gemma4_assistant"
LISTED, COUNTED = "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states"
LAYERS, FULL = "num_nextn_predict_layers", {"layer_types": ["full_attention"] * 4}


@pytest.fixture(autouse=True)
def model_runner_v2(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_engine_on_cpu.use(monkeypatch.setattr)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    # Triton has no CPU backend in this process; nothing is run.
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)


def speculate(
    target: Path, drafter: Path, speculation: dict[str, Any] | None = None, **arguments: Any
) -> Any:
    config = {"model": str(drafter), "num_speculative_tokens": 12, "beam_width": 3}
    config |= speculation or {}
    return EngineArgs(
        model=str(target), enforce_eager=True, speculative_config=config, **arguments
    ).create_engine_config()


@pytest.fixture
def config(small_target: Path, small_drafter: Path) -> Any:
    """Of a user who asks for nothing else."""
    return speculate(small_target, small_drafter)


def test_the_scheduler_counts_what_is_verified_unless_the_user_brings_one(
    config: Any, small_target: Path, small_drafter: Path
) -> None:
    scheduler = config.scheduler_config
    chosen = scheduler.get_scheduler_cls()
    assert issubclass(chosen, TreeScheduler)
    assert issubclass(chosen, AsyncScheduler) == scheduler.async_scheduling
    own = speculate(small_target, small_drafter, scheduler_cls=AsyncScheduler).scheduler_config
    assert own.get_scheduler_cls() is AsyncScheduler


def test_without_the_graphs_that_a_budget_needs_k_follows_the_batch(
    small_target: Path, small_drafter: Path
) -> None:
    """The last of the ranges of batch sizes, and its K. With a budget: test_schedule.py."""
    config = speculate(small_target, small_drafter, max_num_seqs=64)
    assert config.speculative_config.num_speculative_tokens_per_batch_size[-1] == (52, 64, 2)


def speculate_with(target: Path, method: str, model: Path | None = None) -> Any:
    draft = {"method": method, "model": model and str(model), "num_speculative_tokens": 3}
    speculation = {"draft": draft, "num_speculative_tokens": 8}
    arguments = EngineArgs(model=str(target), enforce_eager=True, speculative_config=speculation)
    return arguments.create_engine_config()


def test_vllm_is_told_the_method_of_a_draft_of_its_own_and_the_tree_s_nodes(
    small_target: Path,
) -> None:
    """Its room in the cache follows; a request may ask for what only our sampler does."""
    config = speculate_with(small_target, "draft_model", small_target)
    told = config.speculative_config
    assert (told.method, told.model) == ("draft_model", str(small_target))
    assert told.num_speculative_tokens == config.num_lookahead_tokens == 8
    assert config.parallel_config.worker_cls == names.V2_WORKER
    assert Settings.of(config).draft == "draft_model"
    assert Settings.of(config).config == ReDrafterConfig(8, beam_length=3)
    params = SamplingParams(min_p=0.5)
    params._validate_spec_decode(pickle.loads(pickle.dumps(told)))
    params.extra_args = {"redrafter.spec_tokens": 9}
    with pytest.raises(VLLMValidationError, match="from 0 to 8"):
        params._validate_spec_decode(told)
    config.parallel_config.pipeline_parallel_size = 2
    config.scheduler_config.async_scheduling = True
    (reason,) = refusals(config)
    assert "'draft' and pipeline stages have never been tried together; leave one" in reason


def test_mtp_layers_are_the_target_s_own_and_no_draft_model(tmp_path: Path) -> None:
    target = FamilyWithoutTrees(*GLM, "").make(tmp_path)
    told = speculate_with(target, "mtp").speculative_config
    assert (told.method, told.model, told.num_speculative_tokens) == ("mtp", str(target), 8)
    with pytest.raises(ConfigError, match="draft for one of method 'mtp'; name that one"):
        speculate_with(target, "draft_model", target)


@pytest.mark.parametrize(
    "family",
    [
        FamilyWithoutTrees(*GLM, "no drafter .*: leave it out to", SIZES | {LAYERS: 0}),
        # vLLM checks that it divides what is drafted, not the nodes.
        FamilyWithoutTrees(*GLM, "several MTP layers .*; take the draft's", SIZES | {LAYERS: 3}),
        FamilyWithoutTrees(*GLM, "that read several residuals", SIZES | {"hc_mult": 4}),
        FamilyWithoutTrees(*GEMMA, "'draft' and Gemma 4's MTP, which reads", SIZES | FULL),
    ],
    ids=lambda family: family.message,
)
def test_mtp_layers_that_cannot_draft_in_a_tree_are_refused(
    small_target: Path, tmp_path: Path, family: FamilyWithoutTrees
) -> None:
    with pytest.raises(ConfigError, match=family.message):
        speculate_with(small_target, "mtp", family.make(tmp_path))


@pytest.mark.parametrize(
    ("method", "changed", "message"),
    [
        ("draft_model", {"max_position_embeddings": 40}, "is 512, .* 40; set --max-model-len to"),
        ("draft_model", {"head_dim": 32}, 'of its draft, heads of 32 .*"tree": "chain"'),
        ("eagle", {"hidden_size": 128}, r"are \(64, 512\), its draft's \(128, 512\); name"),
        ("eagle3", {"vocab_size": 300}, r"are \(64, 512\), its draft's \(64, 300\); name"),
        ("eagle3", {LISTED: [0, 9]}, "reads 2 layers .* hand it 1: list them in its config"),
        # vLLM looks here for their number alone.
        ("eagle3", {LISTED: [], COUNTED: None, "eagle_config": {LISTED: [0, 1]}}, "2 .* it 3:"),
    ],
)
def test_drafters_that_do_not_fit_are_refused(
    small_target: Path, tmp_path: Path, method: str, changed: dict[str, Any], message: str
) -> None:
    folder = Drafter(method, small_target, tmp_path).folder
    speculate_with(small_target, method, folder)
    values = json.loads((folder / "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=message):
        speculate_with(small_target, method, folder)


def test_the_user_s_own_sizes_of_graphs_are_known(small_target: Path, small_drafter: Path) -> None:
    largest = {"compilation_config": {"max_cudagraph_capture_size": 8}}
    for arguments in ({}, {"cudagraph_capture_sizes": [1, 2, 4]}, largest):
        settings = Settings.of(speculate(small_target, small_drafter, **arguments))
        assert settings.own_graph_sizes == bool(arguments)


def test_rocm_is_let_through_where_the_user_insists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLATFORM, "is_cpu", lambda self: False)
    monkeypatch.setattr(PLATFORM, "is_rocm", lambda self: True)
    with pytest.raises(ConfigError, match=r"never run .* set REDRAFTER_ALLOW_UNTESTED_PLATFORM=1"):
        engine_here()
    monkeypatch.setenv("REDRAFTER_ALLOW_UNTESTED_PLATFORM", "1")
    engine = engine_here()
    assert (engine.worker, engine.proposer) == (names.V2_WORKER, names.V2_SPECULATOR)
    assert engine.tree_arguments == {"attention_backend": AttentionBackendEnum.CUSTOM}
    assert AttentionBackendEnum.CUSTOM.get_path() == names.V2_TREE_ATTENTION


def test_other_platforms_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of another package may call its devices "cpu" as well."""

    class OtherPlatform(PLATFORM):  # type: ignore[valid-type, misc]
        _enum = PlatformEnum.OOT

    monkeypatch.setattr("vllm.platforms._current_platform", OtherPlatform())
    with pytest.raises(ConfigError, match=r"not on OtherPlatform \(devices of type 'cpu'\)"):
        engine_here()


@pytest.mark.parametrize("asked", [None, False])
def test_async_scheduling_is_allowed(
    small_target: Path, small_drafter: Path, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM decides, before the CPU platform turns it off."""
    update = PLATFORM.check_and_update_config.__func__
    decided = []

    def note(cls: Any, config: Any) -> None:
        decided.append(config.scheduler_config.async_scheduling)
        update(cls, config)

    monkeypatch.setattr(PLATFORM, "check_and_update_config", classmethod(note))
    config = speculate(small_target, small_drafter, async_scheduling=asked)
    assert decided == [asked is not False]
    # The engine's process looks at it again.
    config.scheduler_config.async_scheduling = True
    config.__post_init__()
    assert decided[-1] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_backend": "TRITON_ATTN"}, "TRITON_ATTN cannot verify token trees.*its own"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype is 'fp8_e5m2'; use 'auto'"),
        (
            {"speculation": {"beam_width": 50, "beam_length": 40}},
            "beam_width 50, beam_length 40 .* make 2080 candidates .* at most 2048; choose smaller",
        ),
        (
            {
                "pipeline_parallel_size": 2,
                "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
            },
            "pipeline stages and a KV connector have never been tried together; leave one of them",
        ),
        ({"worker_cls": "other.Worker"}, "worker_cls='other.Worker' cannot be combined"),
        ({"enable_trace_replay": True}, "trace replay .* leave --enable-trace-replay out"),
        ({"logprobs_mode": "processed_logprobs", "return_sampling_mask": True}, "sampling masks"),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_combined_is_refused_but_for_attention_with_chains(
    small_target: Path, small_drafter: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        speculate(small_target, small_drafter, **arguments)
    if next(iter(arguments)).startswith(("attention", "kv_cache")):
        for named in ({"model": str(small_drafter)}, {"method": "redrafter"}):
            given = {**named, "tree": "chain", "num_speculative_tokens": 4}
            args = EngineArgs(str(small_target), speculative_config=given, **arguments)
            assert Settings.of(args.create_engine_config()).config.tree == "chain"


@pytest.mark.parametrize(
    ("section", "field", "value", "remedy"),
    [
        ("", "aux_output_config", EXPERTS_RETURNED, "leave --enable-return-routed-experts out"),
        ("parallel_config", "enable_elastic_ep", True, "leave --enable-elastic-ep out"),
        ("parallel_config", "prefill_context_parallel_size", 2, "is 2, it must be 1"),
        ("parallel_config", "decode_context_parallel_size", 2, "is 2, it must be 1"),
        ("parallel_config", "distributed_executor_backend", "ray", "no workers of Ray on its cpu"),
        ("parallel_config", "data_parallel_backend", "ray", "leave --distributed-exec"),
    ],
)
def test_what_vllm_itself_refuses_here_is_refused(
    config: Any, section: str, field: str, value: Any, remedy: str
) -> None:
    """For these models, or without a GPU, it does so before it asks."""
    setattr(getattr(config, section) if section else config, field, value)
    (reason,) = refusals(config)
    assert remedy in reason


def test_batch_invariance_and_rays_older_executor_are_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    (reason,) = refusals(config)
    assert "unset VLLM_BATCH_INVARIANT" in reason
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    config.parallel_config.distributed_executor_backend = "ray"
    monkeypatch.setattr(PLATFORM, "ray_device_key", "GPU")
    assert not list(refusals(config))
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    (reason,) = refusals(config)
    assert "unset VLLM_USE_RAY_V2_EXECUTOR_BACKEND" in reason


@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_without_full_graphs_the_number_of_nodes_is_fixed_and_logged(
    config: Any, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    possible = mode.has_full_cudagraphs()
    config.compilation_config.cudagraph_mode = mode
    assert bool(list(adaptive_obstacles(config))) != possible
    said: list[str] = []
    monkeypatch.setattr(speculator.logger, "warning", lambda text, *args: said.append(text % args))
    assert speculator._can_adapt(config, ReDrafterConfig(12)) == possible
    assert not speculator._can_adapt(config, ReDrafterConfig(12, adaptive=False))
    assert len(said) == (not possible)
    for warning in said:
        assert re.search(r"num_speculative_tokens=12 .* leave --enforce-eager out", warning)


def test_with_pipeline_stages_or_adapters_the_number_of_nodes_is_fixed_and_not_with_both(
    config: Any,
) -> None:
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    config.lora_config = LoRAConfig()
    (obstacle,) = adaptive_obstacles(config)
    assert re.search(r"LoRA adapter.* leave --enable-lora out", obstacle)
    assert not list(refusals(config))
    config.parallel_config.pipeline_parallel_size = 2
    adapters, scheduling = refusals(config)
    assert "pipeline stages and LoRA adapters have never been tried together" in adapters
    assert "without asynchronous scheduling; leave --no-async-scheduling out" in scheduling
    config.scheduler_config.async_scheduling, config.lora_config = True, None
    (obstacle,) = adaptive_obstacles(config)
    assert "does not know pipeline stages; set --pipeline-parallel-size to 1" in obstacle
    assert not list(refusals(config))


@pytest.mark.parametrize(
    ("platform", "capability", "refusal"),
    [
        ("is_cuda", (8, 6), ".* from compute capability 8.9 on, .* 8.6; use 'auto'"),
        ("is_cuda", (8, 9), None),
        ("is_rocm", (9, 4), ", whose format on ROCm is another; use 'auto'"),
    ],
)
def test_an_fp8_cache_needs_a_gpu_that_converts_it(
    config: Any,
    platform: str,
    capability: tuple[int, int],
    refusal: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton does not compile the kernels for it: tests/triton_kernels/test_compilation.py."""
    config.cache_config.cache_dtype = "fp8"
    found = DeviceCapability(*capability)
    monkeypatch.setattr(PLATFORM, platform, lambda self: True)
    monkeypatch.setattr(PLATFORM, "get_device_capability", lambda *args, **kwargs: found)
    reasons = list(refusals(config))
    assert len(reasons) == (refusal is not None)
    assert all(re.match(f"kv_cache_dtype is 'fp8'{refusal}", reason) for reason in reasons)


def test_heads_whose_tiles_do_not_fit_a_gpu_of_amd_s_get_chains(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiles are compiled in tests/triton_kernels/test_compilation.py."""
    model = config.model_config
    monkeypatch.setattr(type(model), "get_head_size", lambda self: 512)
    assert not list(chain_reasons(model))
    monkeypatch.setattr(PLATFORM, "is_rocm", lambda self: True)
    (reason,) = chain_reasons(model)
    assert reason == "heads of 512 numbers (tree attention on ROCm: at most 256)"


def test_a_head_size_that_tree_attention_does_not_know_gets_chains(
    target: Path, tmp_path: Path
) -> None:
    drafter = make_drafter(tmp_path / "drafter")
    config = speculate(target, drafter, {"num_speculative_tokens": 4, "beam_length": 6})
    assert Settings.of(config).config == ReDrafterConfig(4, 3, 4, tree="chain")
