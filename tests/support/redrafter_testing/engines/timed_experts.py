# SPDX-License-Identifier: Apache-2.0
"""What the experts of a mixture compute while an engine measures its costs."""

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LayerPass(NamedTuple):
    """A layer of experts in a pass: its rows, different tokens, unrouted rows, used experts."""

    rows: int
    tokens: int
    padding: int
    experts: frozenset[int]


seen: list[LayerPass] = []

GRAPHS = (2, 8, 24)
"""Rows of each that vLLM has; there are larger ones besides."""


class Watch(TorchDispatchMode):
    """While entered, fills `seen`, from replays of recorded graphs too."""

    def __init__(self, input_ids: Tensor, is_padding: Tensor) -> None:
        super().__init__()
        self._input_ids, self._is_padding = input_ids, is_padding

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if str(func).startswith("_C.cpu_fused_moe"):
            chosen: Tensor = args[7]
            rows = chosen.shape[0]
            tokens, padding = set(self._input_ids[:rows].tolist()), self._is_padding[:rows].sum()
            experts = frozenset(chosen.flatten().tolist())
            seen.append(LayerPass(rows, len(tokens), int(padding), experts))
        return func(*args, **(kwargs or {}))


def watch_cpu() -> None:
    """For `setup` of a CPU engine, which then measures all sizes, however slow this machine is."""
    from vllm_redrafter.drafting import time_sizes
    from vllm_redrafter.engine.cpu import costs, runner

    measure_costs = runner.measure_costs

    def watched(measured: Any, proposer: Any) -> Any:
        with Watch(measured.input_ids.gpu, measured.is_padding):
            return measure_costs(measured, proposer)

    runner.measure_costs = watched
    costs.MAX_SECONDS, time_sizes.MOST_REPEATS, costs.WARM_UP_SECONDS = 60.0, 1, 0.0


def watch_v2() -> None:
    """For `setup` of an engine on Model Runner V2, which then replays graphs, as on a GPU."""
    from redrafter_testing.gpu import recorded_graphs
    from vllm_redrafter.engine.cuda.runner import GPUTreeModelRunner

    recorded_graphs.use(GRAPHS)
    dummy_run = GPUTreeModelRunner._dummy_run

    def watched(runner: Any, *args: Any, **kwargs: Any) -> Any:
        budget, buffers = runner.adaptive_verification, runner.input_buffers
        if budget is None or not budget.is_profiling:
            return dummy_run(runner, *args, **kwargs)
        with Watch(buffers.input_ids, buffers.is_padding):
            return dummy_run(runner, *args, **kwargs)

    GPUTreeModelRunner._dummy_run = watched


def watched(worker: Any) -> list[LayerPass]:
    """For `Engine.rpc`."""
    return seen


def check(passes: list[LayerPass], of_one_row: int) -> None:
    """Costs are measured with rows that experts compute, of tokens that need different ones."""
    assert not any(each.padding for each in passes), "routers leave rows out"
    several = [each for each in passes if each.rows >= 8]
    assert several
    assert all(each.tokens > 4 for each in several), "rows are equal"
    assert all(len(each.experts) > of_one_row for each in several), "experts are not used"
