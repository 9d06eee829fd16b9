# SPDX-License-Identifier: Apache-2.0
"""Which experts of a mixture compute while an engine measures its costs."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

GRAPHS = (2, 8, 24)
"""Rows of each that vLLM has; there are larger ones besides."""

seen: list[tuple[int, set[int]]] = []
"""Of each layer in each pass: its rows, and the experts that they use."""


class Watch(TorchDispatchMode):
    """While entered, fills `seen`, from replays of recorded graphs too."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if str(func).startswith("_C.cpu_fused_moe"):
            chosen = args[7]
            seen.append((len(chosen), set(chosen.flatten().tolist()) - {-1}))
        return func(*args, **(kwargs or {}))


def watch_cpu() -> None:
    """For `setup` of a CPU engine, which then measures all sizes, however slow this machine is."""
    from vllm_redrafter.drafting import time_sizes
    from vllm_redrafter.engine.cpu.v1 import costs, runner

    measure_costs = runner.measure_costs

    def watched(measured: Any, proposer: Any) -> Any:
        with Watch():
            return measure_costs(measured, proposer)

    runner.measure_costs = watched
    costs.MAX_SECONDS, time_sizes.MOST_REPEATS, costs.WARM_UP_SECONDS = 60.0, 1, 0.0


def watch_v2() -> None:
    """For `setup` of an engine on Model Runner V2, which then replays graphs, as on a GPU."""
    from redrafter_testing.gpu import recorded_graphs
    from vllm_redrafter.engine.v2.runner import GPUTreeModelRunner

    recorded_graphs.use(GRAPHS)
    dummy_run = GPUTreeModelRunner._dummy_run

    def watched(runner: Any, *args: Any, **kwargs: Any) -> Any:
        budget = runner.adaptive_verification
        if budget is None or budget.profiled_length is None:
            return dummy_run(runner, *args, **kwargs)
        with Watch():
            return dummy_run(runner, *args, **kwargs)

    GPUTreeModelRunner._dummy_run = watched


def check(worker: Any, measured: set[int], of_one_row: int) -> None:
    """For `Engine.rpc`: batches of these rows were measured, whose tokens use several experts."""
    assert measured <= {rows for rows, _ in seen}
    fewest = min(len(experts) for rows, experts in seen if rows >= 8)
    assert fewest > of_one_row, "rows are equal, or routers leave them out"
