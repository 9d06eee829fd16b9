# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs on a CPU: a capture is recorded, and replayed on its addresses with its numbers.

So code that is wrong in a graph is wrong here: before each replay, the memory of all graphs is
spoilt; numbers and decisions of the host are the capture's; waiting for the device, or copying from
the host, is an error. vLLM's own capture, dispatch and replay run on recordings unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from redrafter_testing.gpu import no_waiting, torch_flash_attention
from redrafter_testing.gpu.memory_pool import memory_of, tensors_in
from vllm_redrafter.utils.patching import patched

FROM_HOST = ("aten.lift_fresh",)
"""`torch.tensor(...)`: on a GPU a copy from memory that the host may have reused since."""

EMPTY = ("aten.empty", "aten.new_empty")

CAPTURE_SIZES = [1, 2, 4, 8, 16, 24, 48, 72, 120]

cuda: Any = torch.cuda

for_good = ExitStack()

replayed: Counter[str] = Counter()
"""How many replays there were, by what made the graph: "model", "piece" or "draft"."""

profiled: dict[str, list[int]] = {"logits": [], "freed": []}


class Recording(TorchDispatchMode):
    """While entered, collects what is to be replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Callable[[], None]] = []
        self.allocated: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        refused = no_waiting.why_it_waits(name, args)
        if name.startswith(FROM_HOST):
            refused = f"{name} copies from the host"
        if refused:
            raise RuntimeError(f"{refused}, while a graph is captured")
        result = func(*args, **kwargs)
        # By memory, not by the operation's schema, which does not tell of all views.
        known = {memory_of(tensor) for tensor in tensors_in((args, kwargs))}
        fresh = [tensor for tensor in tensors_in(result) if memory_of(tensor) not in known]
        self.allocated += fresh
        if name.startswith(EMPTY) or not (fresh or func._schema.is_mutable):
            return result  # memory alone, or a view
        self.nodes.append(lambda: _run_again(func, args, kwargs, fresh))
        return result

    def add(self, node: Callable[[], Any]) -> Any:
        """Run the function now and in every replay, as one node of the graph."""
        with _disable_current_modes():
            result = node()
        self.nodes.append(node)
        return result


def _run_again(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fresh: list[torch.Tensor]
) -> None:
    result = func(*args, **kwargs)
    if not fresh:
        return
    again = tensors_in(result)
    assert len(again) == len(fresh), f"{func} writes and allocates: not known how to replay"
    for tensor, value in zip(fresh, again, strict=True):
        assert tensor.shape == value.shape, f"{func}: a shape that depends on values"
        tensor.copy_(value)


def _spoil(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    elif tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(-77)


class RecordedGraph:
    """In the place of `torch.cuda.CUDAGraph`."""

    capturing: Recording | None = None
    drafting = False
    alive: ClassVar[WeakSet[RecordedGraph]] = WeakSet()

    def __init__(self) -> None:
        self.kind = "piece"
        self._recording: Recording | None = None
        self._written = True  # since its memory was spoilt
        RecordedGraph.alive.add(self)

    def capture_begin(self, pool: Any = None, **_: Any) -> None:
        assert RecordedGraph.capturing is None, "captures cannot be nested"
        self._recording = RecordedGraph.capturing = Recording()
        self._entered = ExitStack()
        self._entered.enter_context(no_waiting.host_methods(_refused))
        self._entered.enter_context(self._recording)

    def capture_end(self) -> None:
        self._entered.close()
        RecordedGraph.capturing = None

    @torch.inference_mode()
    def replay(self) -> None:
        replayed[self.kind] += 1
        for graph in RecordedGraph.alive:
            if graph._written and graph._recording is not None and not self._keeps(graph):
                for tensor in graph._recording.allocated:
                    _spoil(tensor)
                graph._written = False
        assert self._recording is not None
        self._written = True
        for node in self._recording.nodes:
            node()

    @property
    def num_nodes(self) -> int:
        """How many operations and kernels a replay runs."""
        assert self._recording is not None
        return len(self._recording.nodes)

    def _keeps(self, other: RecordedGraph) -> bool:
        """Pieces of a step read what the pieces before them wrote, as vLLM keeps it."""
        return other is not self and self.kind == other.kind == "piece"


def _refused(name: str) -> Callable[..., Any]:
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"Tensor.{name} waits for the device, while a graph is captured")

    return call


@contextmanager
def record(graph: RecordedGraph, pool: Any = None, **_: Any) -> Iterator[None]:
    """In the place of `torch.cuda.graph`."""
    graph.kind = "draft" if RecordedGraph.drafting else "model"
    graph.capture_begin(pool)
    try:
        yield
    finally:
        graph.capture_end()


def as_one_node(function: Callable[..., None]) -> Callable[..., None]:
    """A function that returns nothing, recorded as if it were a kernel."""

    def call(*args: Any, **kwargs: Any) -> None:
        recording = RecordedGraph.capturing
        if recording is None:
            function(*args, **kwargs)
            return
        with no_waiting.host_methods(no_waiting.ORIGINALS.__getitem__):
            recording.add(lambda: function(*args, **kwargs))

    return call


@contextmanager
def graphs_recorded() -> Iterator[None]:
    """In the body, PyTorch's names for graphs are ours, and interpreted kernels are nodes."""
    from triton.runtime.interpreter import GridExecutor

    with (
        patched(cuda, CUDAGraph=RecordedGraph, graph=record, graph_pool_handle=lambda: (0, 0)),
        patched(GridExecutor, __call__=as_one_node(GridExecutor.__call__)),
    ):
        yield


# In an engine's process

split: Counter[int] = Counter()
"""How often so many parts were planned in this process."""


def use_as_a_gpu_with_long_contexts() -> None:
    """`use`, FlashAttention for prompts, and keys split in steps of up to three requests."""
    from vllm_redrafter.triton_kernels import tree_attention, tree_attention_plan

    use(flash_attention=True)
    tree_attention_plan.MIN_KEYS = 16
    tree_attention_plan.multiprocessors = lambda device: 2
    plan = tree_attention.plan_split

    def planned(*args: Any, **kwargs: Any) -> Any:
        made = plan(*args, **kwargs)
        split[made.parts] += 1
        return made

    tree_attention.plan_split = planned


def read_no_trimmed_batches() -> None:
    """For `setup`: vLLM's Triton attention takes no batch that was trimmed on the device."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    TritonAttentionBackend.supports_device_cpu_query_lens_mismatch = classmethod(lambda cls: False)


def how_keys_were_split(worker: Any) -> dict[int, int]:
    """For `Engine.rpc`."""
    return dict(split)


def use(sizes: Sequence[int] = CAPTURE_SIZES, flash_attention: bool = False) -> None:
    """Engines started here profile, capture graphs of `sizes` rows and schedule as on a GPU."""
    for_good.enter_context(graphs_recorded())
    from vllm.compilation import breakable_cudagraph
    from vllm.config.compilation import CUDAGraphMode
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.platforms.cpu import CpuPlatform
    from vllm.utils import torch_utils
    from vllm.v1.attention.backends import flash_attn, triton_attn
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification
    from vllm.v1.worker.workspace import init_workspace_manager

    from redrafter_testing.engines.interpreted_engine import settle_worker
    from vllm_redrafter.engine.v2 import budget
    from vllm_redrafter.engine.v2.speculator import TreeSpeculator

    update = CpuPlatform.check_and_update_config.__func__

    def keep_graphs(cls: type, vllm_config: Any) -> None:
        asynchronous = vllm_config.scheduler_config.async_scheduling
        update(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asynchronous
        compilation = vllm_config.compilation_config
        compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        most = vllm_config.scheduler_config.max_num_batched_tokens
        fitting = [size for size in sizes if size <= most]
        compilation.cudagraph_capture_sizes = fitting
        compilation.max_cudagraph_capture_size = fitting[-1]

    CpuPlatform.check_and_update_config = classmethod(keep_graphs)
    CpuPlatform.graph_pool_handle = lambda self: (0, 0)
    # Of groups of ranks vLLM expects a communicator that a graph can hold. None is in a stage's.
    GroupCoordinator.graph_capture = lambda group, context: nullcontext(context)
    # As a function that is called, not an operation: what is inside has to be recorded.
    CpuPlatform.opaque_attention_op = classmethod(lambda cls: False)
    # A kernel that the CPU build lacks; memory is kept here in any case.
    torch_utils.weak_ref_tensor = breakable_cudagraph.weak_ref_tensor = lambda tensor: tensor
    settle_worker(None)
    # The tests' PyTorch stand-in for a kernel of vLLM's.
    triton_attn.triton_reshape_and_cache_flash = as_one_node(
        triton_attn.triton_reshape_and_cache_flash
    )
    if flash_attention:
        torch_flash_attention.use()
        for name in ("reshape_and_cache_flash", "flash_attn_varlen_func"):
            setattr(flash_attn, name, as_one_node(getattr(flash_attn, name)))

    determine = CPUWorker.determine_available_memory

    def profile_first(worker: Any) -> int:
        init_workspace_manager(worker.device)
        with _profile_watched(worker.model_runner):
            worker.model_runner.profile_run()
            worker.model_runner.profile_cudagraph_memory()
        return determine(worker)

    CPUWorker.determine_available_memory = profile_first
    CPUWorker.compile_or_warm_up_model = gpu_worker.Worker.compile_or_warm_up_model
    adaptive_verification._PROFILE_REPLAYS = budget.PROFILE_REPLAYS = 1
    # Of particular models and libraries, none of them these; some need a GPU to be imported.
    gpu_worker.kernel_warmup = lambda worker: None

    capture_drafts = TreeSpeculator.capture

    def capture(speculator: Any) -> None:
        with patched(RecordedGraph, drafting=True):
            capture_drafts(speculator)

    setattr(TreeSpeculator, "capture", capture)  # noqa: B010


@contextmanager
def _profile_watched(runner: Any) -> Iterator[None]:
    """Fills `profiled` with what the body, vLLM's memory profile, leaves."""
    from vllm.v1.worker.gpu import cudagraph_utils

    compute_logits, tear_down = (
        runner.model.compute_logits,
        cudagraph_utils._teardown_profiling_state,
    )
    caches: list[StorageWeakRef] = []

    def count_rows(hidden_states: torch.Tensor) -> torch.Tensor:
        profiled["logits"].append(hidden_states.shape[0])
        return compute_logits(hidden_states)

    def note_caches(torn_down: Any) -> None:
        layers = runner.compilation_config.static_forward_context.values()
        attention = (layer for layer in layers if hasattr(layer, "kv_cache"))
        caches.extend(StorageWeakRef(layer.kv_cache.untyped_storage()) for layer in attention)
        tear_down(torn_down)

    with (
        patched(runner.model, compute_logits=count_rows),
        patched(cudagraph_utils, _teardown_profiling_state=note_caches),
    ):
        yield
    profiled["freed"] += [cache.expired() for cache in caches]


def what_was_profiled(worker: Any) -> dict[str, list[int]]:
    """By vLLM's memory profile: the rows of its logits, whether each KV cache was freed."""
    return profiled


def captured(worker: Any) -> dict[str, int]:
    """How many graphs there are of the model's and of the draft's."""
    runner = worker.model_runner
    return {
        "model": len(runner.cudagraph_manager.graphs),
        "draft": len(runner.speculator.graphs.graphs),
    }


@torch.inference_mode()
def draft_on_kernels(worker: Any, answers: bool = True) -> tuple[int, bool, bool]:
    """A draft for one request as on a GPU: its launches, but for those that fuse hidden states;
    whether it reads the embedding's own table; whether a replay drafts what torch does."""
    from redrafter_testing.gpu import torch_drafting

    runner = worker.model_runner
    speculator = runner.speculator
    generator = torch.Generator().manual_seed(0)
    inputs = speculator.inputs
    inputs.hidden[0] = torch.randn(inputs.hidden.shape[1], generator=generator)
    inputs.slots[0] = inputs.num_verified[0] = entry = 0
    if speculator.matching is not None:
        text = torch.tensor([1, 2, 3, 4, 1, 2, 5, 6, 1, 2])
        if (earlier := speculator.matching.earlier) is not None:
            # Found in an answer, if any is kept.
            text[-4:] = earlier.store.ring[0, 1:5].clamp(min=0)
        speculator.matching.earlier = earlier if answers else None
        runner.req_states.all_token_ids.gpu[0, : len(text)] = text
        runner.req_states.total_len.gpu[0] = len(text)
    longest = speculator.lengths[-1]

    def drafted() -> list[torch.Tensor]:
        fields = speculator.trees.fields
        return [speculator.drafts[0].clone(), *(field[entry].clone() for field in fields)]

    trunk = runner.trunk
    kept = trunk.drafter, trunk.searches
    graph = RecordedGraph()
    try:
        # By the drafter, whatever the engine drafts with otherwise.
        trunk.load_model(runner.model)
        speculator.draft(1, longest)
        expected = drafted()
        torch_drafting.use_kernels()
        trunk.load_model(runner.model)
        reads_table = trunk.searches[longest].table is not None
        with cuda.graph(graph):
            speculator.draft(1, longest)
        speculator.trees.tokens[entry] = -77
        graph.replay()
        same = all(map(torch.equal, drafted(), expected))
        # Which a GPU has in fewer launches than are recorded here: a norm is one.
        fusing = RecordedGraph()
        with cuda.graph(fusing):
            trunk.drafter.fused(inputs.hidden[:1])
        launches = graph.num_nodes - fusing.num_nodes
        return launches, reads_table, same
    finally:
        torch_drafting.use()
        trunk.drafter, trunk.searches = kept


def replay(worker: Any, wanted: bool) -> None:
    """Whether steps replay graphs from here on, or run eagerly; what was replayed is forgotten."""
    runner = worker.model_runner
    drafts = [runner.speculator.graphs] if runner.speculator is not None else []
    for manager in (runner.cudagraph_manager, *drafts):
        manager._graphs_captured = wanted
    replayed.clear()


def how_often_replayed(worker: Any) -> dict[str, int]:
    """Replays by kind, since `replay` was called."""
    return dict(replayed)


def assert_replayed(llm: Any, more_than: int, *kinds: str) -> None:
    """For a test: each of these kinds of graphs, so often since `replay` was called."""
    (counted,) = llm.rpc(how_often_replayed)
    assert all(counted.get(kind, 0) > more_than for kind in kinds), counted
