# SPDX-License-Identifier: Apache-2.0
"""Which KV connectors are refused at start-up, and what the message says to do."""

import re
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    compute_nixl_compatibility_hash,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

from redrafter_testing.gpu import cuda_engine_on_cpu
from vllm_redrafter import ConfigError, plugin
from vllm_redrafter.engine import kv_connectors
from vllm_redrafter.engine.cpu import attention as cpu_attention
from vllm_redrafter.engine.v2 import attention as cuda_attention

plugin.register()


@pytest.fixture(params=["cpu", "v2"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    if request.param == "v2":
        cuda_engine_on_cpu.use(monkeypatch.setattr)
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        # Triton has no CPU backend in this process; nothing is run.
        monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    return str(request.param)


@pytest.fixture
def configure(engine: str, few_tokens_target: Path, few_tokens_drafter: Path) -> Any:
    """Makes vLLM's configuration; by default with a drafter."""
    common = {"model": str(few_tokens_target), "skip_tokenizer_init": True, "enforce_eager": True}
    config = {"model": str(few_tokens_drafter), "num_speculative_tokens": 8}

    def make(drafts: bool = True, **arguments: Any) -> Any:
        speculative = config if drafts else None
        arguments |= {**common, "speculative_config": speculative}
        return EngineArgs(**arguments).create_engine_config()

    return make


def transfer(name: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def reasons(given: dict[str, Any], allowed: Collection[str]) -> list[str]:
    config: Any = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(**given),
        cache_config=SimpleNamespace(kv_offloading_size=None),
    )
    return list(kv_connectors.connector_refusals(config, allowed))


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    return transfer("MultiConnector", connectors=list(children))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (multi(transfer("NixlConnector"), transfer("NixlPullConnector")), None),
        (transfer("MooncakeConnector"), "'MooncakeConnector' .* use one of .*, NixlConnector"),
        (
            {**transfer("NixlConnector"), "kv_connector_module_path": "my.module"},
            "'NixlConnector' of my.module may ship .*; leave kv_connector_module_path out",
        ),
        (
            multi(transfer("NixlConnector"), transfer("HF3FSKVConnector")),
            "'HF3FSKVConnector' may ship .* leave --kv-transfer-config",
        ),
    ],
    ids=lambda value: str(value["kv_connector"]) if isinstance(value, dict) else "",
)
def test_only_known_connectors_are_allowed(given: dict[str, Any], message: str | None) -> None:
    for allowed in (kv_connectors.ON_CPU, kv_connectors.ON_CUDA):
        found = reasons(given, allowed)
        assert len(found) == (message is not None)
        assert all(re.search(str(message), reason) for reason in found)


def test_every_name_is_one_of_vllm_s() -> None:
    assert KVConnectorFactory._registry.keys() >= kv_connectors.ON_CUDA > kv_connectors.ON_CPU


def test_offloading_needs_cuda_and_is_refused_by_the_argument_that_was_given(
    engine: str, configure: Any
) -> None:
    if engine == "v2":
        config = configure(kv_offloading_size=1.0)
        assert config.kv_transfer_config.kv_connector == "OffloadingConnector"
        return
    offloading = transfer("OffloadingConnector", cpu_bytes_to_use=1 << 20)
    for option, given in (("kv_offloading_size", 1.0), ("kv_transfer_config", offloading)):
        refused = f"'OffloadingConnector' needs CUDA; .* leave --{option.replace('_', '-')}"
        with pytest.raises(ConfigError, match=refused):
            configure(**{option: given})


def test_lmcache_saves_whole_prompts_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def of_lmcache(**extra: Any) -> list[str]:
        return reasons(multi(transfer("LMCacheConnectorV1", **extra)), kv_connectors.ON_CUDA)

    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 256\nsave_decode_cache: false\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    assert of_lmcache() == []
    refused = "LMCache's {} is not supported; leave it out of {}".format
    layerwise = {"lmcache.use_layerwise": True}
    assert of_lmcache(**layerwise) == [refused("use_layerwise", "kv_connector_extra_config")]
    monkeypatch.setenv("LMCACHE_SAVE_DECODE_CACHE", "True")
    assert of_lmcache() == [refused("save_decode_cache", "the environment")]
    monkeypatch.delenv("LMCACHE_SAVE_DECODE_CACHE")
    file.write_text("save_decode_cache: true\n")
    assert of_lmcache() == [refused("save_decode_cache", file)]


def test_nixl_s_handshake_finds_plain_engines_equal_that_name_their_attention_alike(
    engine: str, configure: Any
) -> None:
    """The name is what --attention-backend takes; plain engines on GPUs choose another one."""
    ours, plain = {
        "v2": (cuda_attention.TreeAttentionBackend, TritonAttentionBackend),
        "cpu": (cpu_attention.TreeAttentionBackend, CPUAttentionBackend),
    }[engine]
    drafting, plain_config = (
        configure(drafts=drafts, kv_transfer_config=transfer("NixlConnector"))
        for drafts in (True, False)
    )
    of_ours = compute_nixl_compatibility_hash(drafting, ours.get_name())
    assert of_ours == compute_nixl_compatibility_hash(plain_config, plain.get_name())
    assert of_ours != compute_nixl_compatibility_hash(plain_config, "FLASH_ATTN")
