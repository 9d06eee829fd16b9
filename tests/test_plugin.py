# SPDX-License-Identifier: Apache-2.0
"""What the plugin recognises, and what it refuses: at start-up, with the values and the remedy."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from torch import nn
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.config import vllm as vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.exceptions import VLLMValidationError

from redrafter_testing.models.checkpoints import edit_config
from redrafter_testing.models.families import MIXTRAL
from redrafter_testing.models.tiny_models import make_drafter
from redrafter_testing.shared_results import made_once
from vllm_redrafter import ConfigError, plugin
from vllm_redrafter.checkpoints import drafter_files
from vllm_redrafter.checkpoints.writing import save_shape
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.engine import published, vllm_interface
from vllm_redrafter.engine.chains import NODES_WITH_STATES
from vllm_redrafter.engine.cpu.v1.proposer import TreeProposer
from vllm_redrafter.engine.speculation import Settings
from vllm_redrafter.engine.speculative_config import Request, validated
from vllm_redrafter.utils import names
from vllm_redrafter.utils.json_files import read_object

plugin.register()

drafter = made_once(make_drafter)


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")


TWELVE = {"num_speculative_tokens": 12}


def configure(target: Path, **arguments: Any) -> Any:
    return EngineArgs(model=str(target), enforce_eager=True, **arguments).create_engine_config()


def speculate(target: Path, drafter: Path, given: Any = None, **arguments: Any) -> Any:
    """The configuration with this drafter; `given` are further keys of the speculative config."""
    config = {"model": str(drafter), **TWELVE} | (given or {})
    return configure(target, speculative_config=config, **arguments)


def test_a_checkpoint_is_recognised_from_the_dict_and_from_the_flags(
    target: Path, drafter: Path
) -> None:
    from_dict = speculate(target, drafter, {"beam_width": 3, "beam_length": 4, "tree": "beams"})
    flags = EngineArgs(
        model=str(target), enforce_eager=True, spec_model=str(drafter), spec_tokens=12
    )
    # The same arguments can make an engine twice.
    from_flags, again = flags.create_engine_config(), flags.create_engine_config()
    assert (flags.spec_model, flags.worker_cls) == (str(drafter), "auto")
    for config in (from_dict, from_flags, again):
        assert config.parallel_config.worker_cls == names.CPU_WORKER
        assert config.speculative_config.num_speculative_tokens == 12
        assert config.additional_config[names.METHOD]["model"] == str(drafter)
    assert from_dict.additional_config[names.METHOD]["tree"] == "beams"
    assert from_flags.additional_config[names.METHOD]["beam_width"] == 4


def test_a_drafter_s_config_is_read_once_in_the_front_end_and_once_in_a_worker(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the hub each reading may be a round trip."""
    read = Mock(side_effect=read_object)
    monkeypatch.setattr(drafter_files, "read_object", read)
    config = configure(target, spec_model=str(drafter), spec_tokens=12)
    read.assert_called_once_with(drafter / "config.json")
    TreeProposer(config).load_model(nn.ModuleDict({"embed_input_ids": nn.Embedding(512, 128)}))
    assert read.call_args_list == 2 * [call(drafter / "config.json")]


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def test_k_by_batch_size_is_kept_for_our_worker_alone(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33 drops it for methods that it does not know, on its V1 runner."""
    configs = [configure(target), configure(target, speculative_config=NGRAM)]
    configs.append(speculate(target, drafter))
    name, asked = "_maybe_disable_dynamic_sd_for_v1", list[Any]()
    monkeypatch.setattr(VllmConfig, name, lambda config: asked.append(config), raising=False)
    plugin.register()
    for config in configs:
        config._maybe_disable_dynamic_sd_for_v1()
    assert [id(config) for config in asked] == [id(config) for config in configs[:2]]


def test_async_scheduling_is_what_it_is_without_speculation(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU vLLM turns it off, and neither refuses the flag nor warns."""
    said = Mock()
    monkeypatch.setattr(vllm_config.logger, "warning_once", said)
    for asked in (None, True):
        plain = configure(target, async_scheduling=asked)
        ours = speculate(target, drafter, async_scheduling=asked)
        assert not plain.scheduler_config.async_scheduling
        assert not ours.scheduler_config.async_scheduling
        name = "disable_nccl_for_dp_synchronization"
        assert getattr(ours.parallel_config, name) == getattr(plain.parallel_config, name)
    assert said.called and "sync scheduling" not in str(said.call_args_list)


def test_plain_runs_and_other_methods_are_untouched(target: Path, drafter: Path) -> None:
    ngram = configure(target, speculative_config=NGRAM)
    for config in (configure(target), ngram):
        assert "redrafter" not in config.parallel_config.worker_cls
        assert names.METHOD not in config.additional_config
    # Sampling parameters that our sampler applies are let through.
    ours = speculate(target, drafter).speculative_config
    SamplingParams(min_p=0.1, logit_bias={1: 2.0})._validate_spec_decode(ours)
    for refused, method, message in (
        (SamplingParams(min_p=0.1), ngram.speculative_config, "min_p and logit_bias"),
        (SamplingParams(thinking_token_budget=5), ours, "thinking_token_budget"),
    ):
        with pytest.raises(VLLMValidationError, match=message):
            refused._validate_spec_decode(method)


# A drafter that is named alone.


def record(drafter: Path, folder: Path, **entries: Any) -> Path:
    """A copy of the drafter whose config.json says more under `speculators_config`."""
    shutil.copytree(drafter, folder)
    edit_config(folder, lambda values: values["speculators_config"].update(entries))
    return folder


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    logger = SimpleNamespace(info=lambda text, *values: said.append(text % values))
    monkeypatch.setattr("vllm_redrafter.engine.log.logger", logger)
    return said


def test_a_large_draft_vocabulary_is_advised_against_at_the_start(
    target: Path, drafter: Path, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    speculate(target, drafter)
    assert len(log) == 1 and log[0].startswith("Speculating with ReDrafter")
    monkeypatch.setattr("vllm_redrafter.heads.head.LARGE_DRAFT_VOCABULARY", 10)
    speculate(target, drafter)
    assert "--draft-vocab-size 32768" in log[-1]


METHODS = [{"proposal_type": "redrafter", "speculative_tokens": 7, "beam_width": 2}]


def test_a_drafter_stands_for_its_target_and_itself(
    target: Path, drafter: Path, tmp_path: Path
) -> None:
    verifier, here = {"name_or_path": str(target)}, {"target": str(target)}
    alone = record(drafter, tmp_path / "alone", verifier=verifier, proposal_methods=METHODS)
    config = configure(alone)
    assert (config.model_config.model, config.model_config.tokenizer) == (str(target), str(target))
    settings = config.additional_config[names.METHOD]
    assert settings["model"] == str(alone)
    assert (settings["num_speculative_tokens"], settings["beam_width"]) == (7, 2)
    assert settings["beam_length"] == 5, "what the checkpoint does not record has its default"
    assert config.speculative_config.num_speculative_tokens == 7
    # A target that moved is named beside its drafter.
    verifier["name_or_path"] = str(tmp_path / "not here")
    moved = record(drafter, tmp_path / "moved", verifier=verifier, proposal_methods=METHODS)
    assert configure(moved, speculative_config=here).model_config.model == str(target)
    with pytest.raises(ConfigError) as error:
        configure(moved)
    serve, option = f"vllm serve TARGET --spec-model {moved}", """'{"target": "TARGET"}'"""
    for part in (verifier["name_or_path"], serve, f"--speculative-config {option}"):
        assert part in str(error.value)


def test_a_shape_that_evaluate_recorded_is_served_field_by_field(
    target: Path, drafter: Path, tmp_path: Path
) -> None:
    recorded = record(drafter, tmp_path / "recorded")
    save_shape(str(recorded), ReDrafterConfig(7, beam_width=2, beam_length=6))
    keys = ("num_speculative_tokens", "beam_width", "beam_length")
    for given, expected in (({}, (7, 2, 6)), ({"beam_length": 4}, (7, 2, 4))):
        config = configure(target, speculative_config={"model": str(recorded), **given})
        assert tuple(config.additional_config[names.METHOD][key] for key in keys) == expected
        assert config.speculative_config.num_speculative_tokens == 7
    config = configure(target, spec_model=str(recorded), spec_tokens=3)
    assert tuple(config.additional_config[names.METHOD][key] for key in keys) == (3, 2, 6)
    with pytest.raises(ConfigError, match="beam_length must be at most 127, got 128"):
        configure(target, speculative_config={"model": str(recorded), "beam_length": 128})


def test_what_a_lone_drafter_lacks_and_a_target_given_twice_are_refused(
    target: Path, drafter: Path
) -> None:
    with pytest.raises(ConfigError, match="does not say for which target it is: name the target"):
        configure(drafter)
    with pytest.raises(ConfigError, match=r"--spec-tokens\) is missing, and the checkpoint does"):
        configure(drafter, speculative_config={"target": str(target)})
    with pytest.raises(ConfigError, match=r"'target' .* is for a drafter that is served by its"):
        speculate(target, drafter, given={"target": str(target)})


@pytest.mark.parametrize("wrong", ["7", None, 200])
def test_a_recorded_shape_is_checked_as_a_given_one(
    target: Path, drafter: Path, tmp_path: Path, wrong: Any
) -> None:
    methods = [{"speculative_tokens": wrong}]
    recorded = record(drafter, tmp_path / "recorded", proposal_methods=methods)
    message = (
        f"^{recorded}/config.json: speculative_tokens in proposal_methods.*num_speculative_tokens "
        f"must be between 1 and 127.*{wrong!r}.*give num_speculative_tokens yourself, or record an"
    )
    with pytest.raises(ConfigError, match=message):
        configure(target, spec_model=str(recorded))
    config = configure(target, spec_model=str(recorded), spec_tokens=5)
    assert config.speculative_config.num_speculative_tokens == 5


def test_without_a_drafter_prompt_lookup_matches_are_verified(target: Path, log: list[str]) -> None:
    given = {"speculative_config": {"method": "redrafter", **TWELVE}}
    for arguments in (given, {"spec_method": "redrafter", "spec_tokens": 12}):
        made = configure(target, **arguments)
        assert made.parallel_config.worker_cls == names.CPU_WORKER
        settings = Settings.of(made)
        assert (settings.model, settings.config.context_matches) == (None, 2)
        assert "in the text alone: num_spec" in log[-1] and "tree" not in log[-1]
    configure(target, speculative_config={"method": "redrafter", "tree": "chain", **TWELVE})
    assert any("tree='chain'" in line for line in log)


# Refusals. Each message names the value and what to do.


DRAFT = {"method": "draft_model", "model": "small", "num_speculative_tokens": 4}
BESIDE_DRAFT: list[tuple[dict[str, Any], str]] = [
    ({}, "'draft' runs on GPUs alone.*CPU backend: use the draft's own method there, or leave"),
    ({"draft": "small"}, "'draft' must be an object, as in {.*, got 'small'"),
    ({"method": "eagle3", "model": "x"}, "'draft' is the drafter; leave 'method', 'model' out"),
    ({"beam_length": 5, "candidates": 64}, "'draft' is .*; leave 'beam_length', 'candidates' out"),
    ({"num_speculative_tokens": None}, "'draft' drafts 4 tokens .* is None: give 4 or more"),
    ({"num_speculative_tokens": 3}, "'draft' drafts 4 tokens .* is 3: give 4 or more"),
]
IN_DRAFT: list[tuple[dict[str, Any], str]] = [
    ({"method": "ngram"}, "'draft': 'method' must be one of draft_model.*, got 'ngram'"),
    ({"model": None}, "'draft': 'model' must name its checkpoint, got None"),
    ({"num_speculative_tokens": 0}, "'draft': num_speculative_tokens must be .* at least 1, got 0"),
    ({"parallel_drafting": True}, "'draft' takes no 'parallel_drafting': .*P-EAGLE.*; leave it"),
    ({"use_heterogeneous_vocab": True}, "takes no 'use_heterogeneous_vocab': .*; leave it out"),
    ({"draft_sample_method": "greedy"}, "takes no 'draft_sample_method': .*; leave it out"),
    ({"beam_width": 2}, "'draft' takes no 'beam_width': known are method, model, .*; leave it out"),
]


@pytest.mark.parametrize(
    ("has_drafter", "settings", "message"),
    [
        (False, {"beam_width": 3, "tree": "explored"}, "beam_width, tree without.*--spec-model"),
        (False, {"revision": "chain"}, "revision without a drafter"),
        (False, {"candidates": 64}, "candidates without a drafter: name a drafter.*or leave"),
        (False, {"context_matches": 0}, "context_matches=0 there is nothing to verify: name a d"),
        (False, {"model": 7}, "'model' must name the ReDrafter checkpoint.*got 7"),
        *((False, {"draft": DRAFT} | beside, message) for beside, message in BESIDE_DRAFT),
        *((False, {"draft": DRAFT | inside}, message) for inside, message in IN_DRAFT),
        (True, {"num_speculative_tokens": 0}, "between 1 and 127.*leave the spec.*got 0"),
        (True, {"unknown": 1}, r"unknown key\(s\) unknown.*known are adaptive, beam_length"),
        (True, {"adaptive": "yes"}, "adaptive must be true or false, got 'yes'"),
    ],
)
def test_settings_out_of_range_or_of_a_drafter_that_is_missing(
    target: Path, drafter: Path, has_drafter: bool, settings: dict[str, Any], message: str
) -> None:
    given = {"model": str(drafter)} if has_drafter else {"method": "redrafter"}
    with pytest.raises(ConfigError, match=message):
        configure(target, speculative_config=TWELVE | given | settings)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (None, r"is not a ReDrafter checkpoint.*found 'llama'"),
        ({"hidden_size": 64}, "does not fit .*: the drafter's hidden size is 64, the target's 128"),
        ({"target_layers": (1, 3)}, r"layers 1, 3 are asked for, and the target has 3"),
    ],
)
def test_checkpoints_that_do_not_fit(
    target: Path, tmp_path: Path, sizes: dict[str, Any] | None, message: str
) -> None:
    drafter = target if sizes is None else make_drafter(tmp_path / "drafter", **sizes)
    with pytest.raises(ConfigError, match=message):
        speculate(target, drafter, given={"method": "redrafter"})


def test_what_vllm_compiled_for_other_layers_is_not_taken(target: Path, tmp_path: Path) -> None:
    plain = speculate(target, make_drafter(tmp_path / "drafter"))
    fused = speculate(target, make_drafter(tmp_path / "drafter", target_layers=(1, 2)))
    assert fused.additional_config["redrafter"]["target_layers"] == [1, 2]
    assert fused.compute_hash() != plain.compute_hash()


def test_a_changed_vllm_and_its_second_runner_are_refused(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ConfigError, match="unset VLLM_USE_V2_MODEL_RUNNER"):
        speculate(target, drafter)
    monkeypatch.setattr(vllm_interface, "first_change", lambda root, engine: f"{engine} is gone")
    with pytest.raises(ConfigError, match=r"not run on vLLM 0.*: cpu is gone. It runs on 0.32"):
        speculate(target, drafter)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"runner": "pooling"}, "pooling"),
        ({"worker_cls": "other.Worker"}, "worker_cls='other.Worker' cannot be combined"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype 'fp8'.*leave it at 'auto'"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2; on the CPU backend it must"),
        ({"distributed_executor_backend": "ray"}, "no workers of Ray on its cpu platform; leave"),
        ({"data_parallel_backend": "ray"}, "leave .*--data-parallel-backend out"),
        ({"use_fp64_gumbel": True}, "use_fp64_gumbel"),
        ({"kv_sharing_fast_prefill": True}, "leave --kv-sharing-fast-prefill out"),
        ({"logits_processors": ["some.P"]}, "some.P.*leave --logits-processors out"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be_combined(
    target: Path, drafter: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        speculate(target, drafter, **arguments)


def test_an_installed_logits_processor_is_refused_with_its_package(
    target: Path, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (installed := tmp_path / "seven_plugin-1.0.dist-info").mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: seven-plugin\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[vllm.logits_processors]\nseven = sevens:Seven\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = r"'seven' \(sevens:Seven\) of the package 'seven-plugin' .* uninstall the package, or"
    with pytest.raises(ValueError, match=message):
        speculate(target, drafter)


def test_a_mixture_of_experts_on_several_ranks(tmp_path: Path) -> None:
    target = MIXTRAL.make(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", MIXTRAL.vocab_size, MIXTRAL.hidden_size)
    assert speculate(target, drafter, skip_tokenizer_init=True).model_config.is_moe
    with pytest.raises(ConfigError, match=r"data_parallel_size is 2.*leave --data-parallel-size"):
        speculate(target, drafter, skip_tokenizer_init=True, data_parallel_size=2)


@pytest.mark.parametrize(
    ("kind", "rank", "launches"),
    [(AsyncEngineArgs, -1, True), (AsyncEngineArgs, 0, False), (EngineArgs, 0, False)],
    ids=["several API servers", "one server", "no server"],
)
def test_engines_of_several_api_servers_find_a_directory_for_their_counters(
    target: Path, drafter: Path, kind: type[EngineArgs], rank: int, launches: bool
) -> None:
    arguments = kind(model=str(target), enforce_eager=True, spec_model=str(drafter), spec_tokens=4)
    arguments._api_process_count, arguments._api_process_rank = 2, rank
    try:
        arguments.create_engine_config()
        assert (published.DIRECTORY in os.environ) == launches
    finally:
        published.close_directory()


def test_a_target_with_recurrent_layers_has_few_nodes_unless_they_are_asked_for() -> None:
    for asked, max_nodes in ({}, 3), ({"num_speculative_tokens": 9}, 9):
        request = Request({"method": "redrafter", **asked})
        config, drafter = validated(request, lambda: NODES_WITH_STATES)
        assert (config.num_speculative_tokens, drafter) == (max_nodes, None)


def test_a_target_of_which_another_ones_weights_would_be_loaded_is_refused(
    target: Path, drafter: Path, tmp_path: Path
) -> None:
    shutil.copytree(target, tmp_path / "run[1]")
    with pytest.raises(ConfigError, match=r"run\[1\]': .* are a pattern where .* rename the fold"):
        speculate(tmp_path / "run[1]", drafter, given={"method": "redrafter"})
