"""The drafter's vocabulary-wide layer in fp8: what it multiplies with, and that drafts use it.

On a GPU vLLM's own kernel multiplies. On a CPU one of torch's stands for it, and its packing is run
as far as a CPU can.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from vllm import _custom_ops as ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import MarlinFP8ScaledMMLinearKernel
from vllm.platforms.interface import PlatformEnum

from redrafter_testing.engines.forked_engine import Engine
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.gpu import torch_weight_only
from redrafter_testing.gpu.torch_weight_only import TorchWeightOnly
from redrafter_testing.requests import few_tokens
from redrafter_testing.requests.answers import single_tokens_of
from vllm_redrafter import save_drafter
from vllm_redrafter.engine.cuda import fp8_layer
from vllm_redrafter.engine.cuda.fp8_layer import Fp8Layer, fp8_obstacles, quantise
from vllm_redrafter.heads.fp8 import quantise_rows, rounded_rows
from vllm_redrafter.heads.medusa import MedusaConfig, MedusaHead
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead

CONFIG = VllmConfig()
ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
CLOSE = {"rtol": 2e-2, "atol": 5e-2} if ON_GPU else {"rtol": 1e-5, "atol": 1e-4}

on_cpu = pytest.mark.skipif(ON_GPU, reason="stands for what a GPU does for real")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linear._POSSIBLE_WFP8A16_KERNELS, PlatformEnum.CPU, [TorchWeightOnly])


def linear_layer(dtype: torch.dtype = DTYPE, device: str = DEVICE) -> nn.Linear:
    """From 128 inputs to 256 outputs."""
    torch.manual_seed(0)
    return nn.Linear(128, 256, bias=False, dtype=dtype, device=device).requires_grad_(False)


def inputs(columns: int) -> torch.Tensor:
    return torch.randn(3, columns, dtype=DTYPE, device=DEVICE)


@pytest.mark.usefixtures("kernel")
def test_a_layer_multiplies_with_the_rounded_weights() -> None:
    plain, x = linear_layer(), inputs(128)
    found = Fp8Layer(plain, CONFIG)(x)
    expected = F.linear(x, rounded_rows(plain.weight))
    torch.testing.assert_close(found, expected, **CLOSE)
    rounding = (plain(x) - expected).float().norm()
    assert (found - expected).float().norm() < 0.3 * rounding


@pytest.mark.usefixtures("kernel")
def test_other_weights_come_into_the_same_memory() -> None:
    plain, x = linear_layer(), inputs(128)
    layer = Fp8Layer(plain, CONFIG)
    address = layer.packed.weight.data_ptr()
    other = 0.1 * torch.randn(256, 128)
    layer.replace(other)
    expected = F.linear(x, rounded_rows(other.to(plain.weight)))
    torch.testing.assert_close(layer(x), expected, **CLOSE)
    assert layer.packed.weight.data_ptr() == address


@pytest.mark.usefixtures("kernel")
def test_rows_are_kept_where_they_are_asked_for_and_replaced_in_place() -> None:
    plain = linear_layer()
    assert Fp8Layer(plain, CONFIG).rows is None
    layer = Fp8Layer(plain, CONFIG, keep_rows=True)
    assert layer.rows is not None
    addresses = [part.data_ptr() for part in layer.rows]
    for weight in (plain.weight, 0.1 * torch.randn_like(plain.weight)):
        layer.replace(weight)
        expected = quantise_rows(weight)
        assert torch.equal(layer.rows.quantised.float(), expected.quantised.float())
        assert torch.equal(layer.rows.scales, expected.scales)
    assert [part.data_ptr() for part in layer.rows] == addresses
    assert set(layer.state_dict()) == {"weight"}


@pytest.mark.usefixtures("kernel")
def test_a_drafter_s_state_is_that_of_its_checkpoint_without_the_layer() -> None:
    torch.manual_seed(0)
    drafter = RecurrentHead(RecurrentConfig(256, 64, 128, num_draft_layers=2))
    drafter.requires_grad_(False).to(DEVICE, DTYPE)
    state, x = drafter.state_dict(), inputs(128)
    expected = F.linear(x, rounded_rows(drafter.vocabulary_layers[0].weight))
    replaced = quantise(drafter, CONFIG)
    shapes = {name: tensor.shape for name, tensor in drafter.state_dict().items()}
    assert shapes.keys() == state.keys()
    assert [n for n in shapes if shapes[n] != state[n].shape] == [*replaced] == ["lm_head.2.weight"]
    torch.testing.assert_close(drafter.vocabulary_layer(0)(x), expected, **CLOSE)
    assert drafter.dtype == DTYPE


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("shared_output", [False, True])
def test_a_head_s_layers_of_all_depths_are_in_fp8(shared_output: bool) -> None:
    torch.manual_seed(0)
    drafter = MedusaHead(MedusaConfig(256, 128, num_heads=3, shared_output=shared_output))
    drafter.requires_grad_(False).to(DEVICE, DTYPE)
    x, before = inputs(128), [layer.weight for layer in drafter.vocabulary_layers]
    replaced = quantise(drafter, CONFIG)
    names = ["lm_head"] if shared_output else ["lm_heads.0", "lm_heads.1", "lm_heads.2"]
    assert list(replaced) == [f"{name}.weight" for name in names]
    assert list(replaced.values()) == list(drafter.vocabulary_layers)
    for depth in range(3):
        weight = before[0 if shared_output else depth]
        found = drafter.vocabulary_layer(depth)(x)
        torch.testing.assert_close(found, F.linear(x, rounded_rows(weight)), **CLOSE)


@on_cpu
def test_vllm_s_kernel_takes_the_layer_as_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of Marlin's preparation but the reordering of weights, which only a GPU can."""
    plain = linear_layer(torch.bfloat16)
    repacked: list[Any] = []

    def repack(b_q_weight: torch.Tensor, **sizes: int) -> torch.Tensor:
        repacked.append((b_q_weight, sizes))
        return b_q_weight.clone()

    monkeypatch.setattr(ops, "gptq_marlin_repack", repack)
    supported = classmethod(lambda cls, capability=None: (True, None))
    monkeypatch.setattr(MarlinFP8ScaledMMLinearKernel, "is_supported", supported)
    layer = Fp8Layer(plain, CONFIG)
    ((weight, sizes),) = repacked
    assert sizes == {"size_k": 128, "size_n": 256, "num_bits": 8}
    # Four weights of a column in each number, the first in its last byte.
    quantised, scales = quantise_rows(plain.weight)
    assert torch.equal(weight.T.contiguous().view(torch.float8_e4m3fn), quantised)
    packed = layer.packed.weight_scale
    assert (packed.dtype, packed.shape) == (torch.bfloat16, (1, 256))
    # Times 2 to the 120, the difference of the exponents' biases; in another order.
    found = (packed.float() / 2.0**120).flatten().sort().values
    torch.testing.assert_close(found, scales.float().flatten().sort().values)


def config_of(dtype: torch.dtype) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(dtype=dtype))


def test_what_vllm_has_no_kernel_for_is_refused() -> None:
    (reason,) = fp8_obstacles(config_of(torch.float32))
    assert "16-bit numbers, not torch.float32" in reason and "--dtype bfloat16" in reason


@on_cpu
def test_a_platform_without_a_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_layer, "set_current_vllm_config", lambda config: nullcontext())
    (reason,) = fp8_obstacles(config_of(torch.bfloat16))
    assert "vLLM has no layer for it here" in reason
    monkeypatch.setitem(linear._POSSIBLE_WFP8A16_KERNELS, PlatformEnum.CPU, [TorchWeightOnly])
    with set_current_vllm_config(CONFIG):
        assert not list(fp8_obstacles(config_of(torch.bfloat16)))


@pytest.fixture(scope="module")
def in_fp8(few_tokens_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(an engine, its drafter's folder)."""
    folder = write_drafter(tmp_path_factory.mktemp("drafter"), seed=1)
    with interpreted_engine(
        few_tokens_target,
        setup=torch_weight_only.use,
        skip_tokenizer_init=True,
        speculative_config={
            "model": str(folder),
            "num_speculative_tokens": 8,
            "head_dtype": "fp8",
        },
    ) as llm:
        yield llm, folder


def write_drafter(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = RecurrentConfig(few_tokens.VOCAB, few_tokens.HIDDEN, few_tokens.HIDDEN)
    save_drafter(RecurrentHead(config), folder)
    return folder


@pytest.mark.engine
def test_drafts_go_through_the_layer_and_output_equals_plain(
    in_fp8: tuple[Engine, Path], few_tokens_plain: dict[str, list[list[int]]]
) -> None:
    llm, _ = in_fp8
    for sampling, expected in few_tokens_plain.items():
        assert single_tokens_of(llm.run(few_tokens.requests(sampling))) == expected
    assert llm.counter("vllm:spec_decode_num_accepted_tokens") > 20, "trees were hardly used"
    (multiplied,) = llm.rpc(torch_weight_only.how_often)
    assert multiplied[few_tokens.VOCAB] > 50 and len(multiplied) == 1


@pytest.mark.engine
def test_reloaded_weights_are_quantised_into_the_same_memory(in_fp8: tuple[Engine, Path]) -> None:
    llm, folder = in_fp8
    ((address, before),) = llm.rpc(torch_weight_only.weights)
    write_drafter(folder, seed=2)
    llm.rpc("reload_weights")
    ((reloaded, after),) = llm.rpc(torch_weight_only.weights)
    torch.manual_seed(2)
    config = RecurrentConfig(few_tokens.VOCAB, few_tokens.HIDDEN, few_tokens.HIDDEN)
    quantised, _ = quantise_rows(RecurrentHead(config).vocabulary_layers[0].weight)
    assert reloaded == address and not torch.equal(after, before)
    assert torch.equal(after, quantised.float().t())
