# SPDX-License-Identifier: Apache-2.0
"""The kernels' launches in the engine's shapes, on CPU tensors whose contents do not matter."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from redrafter_testing.algorithm.tree_batches import chain
from redrafter_testing.gpu.tree_attention_launch import Launch, Shape, attend
from vllm_redrafter.tree.context_matches import MATCH_CLASSES
from vllm_redrafter.triton_kernels.accept_path import AcceptedPaths, SampledRows, accept_path
from vllm_redrafter.triton_kernels.admit_nodes import admit_nodes
from vllm_redrafter.triton_kernels.build_tree import (
    NodeLimits,
    ScoredTrees,
    TreeBuffers,
    build_tree,
)
from vllm_redrafter.triton_kernels.candidates import choose_candidates, rank_candidates
from vllm_redrafter.triton_kernels.compact_kv import CacheTable, compact_kv, gather_path
from vllm_redrafter.triton_kernels.draft_layers import Product, draft_layer
from vllm_redrafter.triton_kernels.earlier_answers import AnswerStore, enter_answers, find_earlier
from vllm_redrafter.triton_kernels.find_matches import MatchBuffers, find_matches
from vllm_redrafter.triton_kernels.gated_layer import Rows, gated_cell, scale_normed
from vllm_redrafter.triton_kernels.gather_dot import gather_dot
from vllm_redrafter.triton_kernels.grow_beams import BeamBuffers, grow_beams
from vllm_redrafter.triton_kernels.join_matches import JoinedBuffers, SearchedNodes, join_matches
from vllm_redrafter.triton_kernels.load_drafts import DraftInputs, StepEnd, load_drafts
from vllm_redrafter.triton_kernels.observe_matches import observe_matches
from vllm_redrafter.triton_kernels.observe_nodes import COLUMNS, VerifiedTrees, observe_nodes
from vllm_redrafter.triton_kernels.speculator_cell import WIDEST, speculator_cell
from vllm_redrafter.triton_kernels.stage_trees import StagedTrees, add_depths, stage_trees
from vllm_redrafter.triton_kernels.top_candidates import TopTokens, top_candidates

CONTEXT = 4096
DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "fp8": (torch.bfloat16, torch.float8_e4m3fn),
}
"""Queries' and cache's, by the name of the cache's."""


@dataclass(frozen=True)
class Attention:
    """One launch of tree attention, of K + 1 `nodes` and keys in `parts`, with its variants."""

    head_dim: int = 128
    dtype: str = "bf16"
    group: int = 4
    nodes: int = 33
    block_size: int = 16
    parts: int = 8
    window: bool = False
    cap: bool = False
    sinks: bool = False

    def __call__(self) -> None:
        """As engine/v2/attention.py: K and V are halves of one row of 2 x head_dim."""
        sizes = self.head_dim, 2, self.group, self.block_size, *DTYPES[self.dtype]
        trees = [(CONTEXT, chain(self.nodes))]
        launch = Launch(torch.device("cpu"), trees, Shape(*sizes, "side by side"))
        attend(
            **launch.arguments(),
            out=torch.empty_like(launch.query),
            depths=launch.depths,
            sliding_window=1024 if self.window else 0,
            soft_cap=30.0 if self.cap else 0.0,
            sinks=launch.sinks if self.sinks else None,
            num_parts=self.parts,
        )


def integers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def step_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The kernels around attention, by name."""
    for max_nodes in (32, 127):
        yield f"K {max_nodes}", partial(step, max_nodes + 1)
    for width, length in ((8, 5), (64, 32)):
        yield f"beams {width}x{length}", partial(build, width, length)


HIDDEN, ROWS, VOCAB = 4096, 16, 128_256
"""Of a draft's layers."""


def draft_level(width: int = 4) -> None:
    """top_candidates and grow_beams, for one request's level after the first."""
    top_candidates(torch.zeros(width, VOCAB, dtype=torch.bfloat16), width)
    found = torch.zeros(width, width)
    grow_beams(
        TopTokens(found, found.int(), found[0]),
        1,
        1,
        BeamBuffers(1, 5, width, "cpu"),
        to_target=torch.zeros(VOCAB, dtype=torch.int64),
        survival=(torch.zeros(2, 1), torch.zeros(2, 5), torch.zeros(1)),
    )


def recurrent_layer() -> None:
    """draft_layer with all that a state needs."""
    x = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16)
    weight = torch.zeros(HIDDEN, HIDDEN, dtype=torch.bfloat16)
    looked_up = Product(x, weight, torch.zeros(ROWS, dtype=torch.int64))
    continued = Product(x, weight, integers(ROWS))
    draft_layer(looked_up, torch.zeros_like(x), continued, bias=x[0], silu=True)


def gated_layers(rows: int = 64) -> None:
    """gated_cell, draft_layer as the gated head's residual block, and scale_normed."""
    x, out = torch.zeros(2, rows, HIDDEN, dtype=torch.bfloat16)
    weight = torch.zeros(2 * HIDDEN, 2 * HIDDEN, dtype=torch.bfloat16)
    embedded = Rows(x, torch.zeros(rows, dtype=torch.int64))
    gated_cell(embedded, Rows(x, integers(rows)), weight, weight[0], out, 1e-6)
    block = Product(x, weight[:HIDDEN, :HIDDEN])
    draft_layer(block, out, bias=x[0], silu=True, residual=x, epsilon=1e-6)
    scale_normed(x, x[0], out, 1e-6)


def speculator_cells(parts: int, width: int, rows: int = 4) -> None:
    """speculator_cell of an MLP, or of an LSTM, whose states have two parts."""
    states, out = torch.zeros(2, rows, parts * width, dtype=torch.bfloat16)
    projected = torch.zeros(rows, parts * parts * width, dtype=torch.bfloat16)
    norm = projected[0, :width]
    embedded = Rows(projected[:, :width], torch.zeros(rows, dtype=torch.int64))
    above = Rows(states, integers(rows))
    speculator_cell(embedded, projected, above, [norm] * 2 * parts, out, 1.0, 1e-6)


def candidates(count: int = 128, width: int = 4) -> None:
    """choose_candidates of 5 levels, and gather_dot and rank_candidates of one below the first."""
    choose_candidates(torch.zeros(5, VOCAB, dtype=torch.bfloat16), 1, count, width)
    x = torch.zeros(width, HIDDEN, dtype=torch.bfloat16)
    chosen, weight = integers(1, count), torch.zeros(count, HIDDEN, dtype=torch.bfloat16)
    for scale in (None, x[0]):
        gather_dot(x, weight, chosen, scale=scale, epsilon=1e-6)
    rank_candidates(torch.zeros(width, count), chosen, width)


def learn(slots: int = 13, depths: int = 5, requests: int = 2) -> None:
    """observe_nodes."""
    tree = integers(requests, slots)
    observe_nodes(
        torch.zeros(requests, dtype=torch.int64),
        torch.zeros(requests, slots),
        VerifiedTrees(tree, tree, tree, integers(requests), tree, torch.zeros(requests)),
        torch.zeros(2, 1),
        torch.zeros(2, depths),
        torch.zeros(requests, depths, COLUMNS),
        torch.zeros(2, depths, COLUMNS),
    )


def match(paths: int = 2, depth: int = 8, tokens: int = 32_768, requests: int = 2) -> None:
    """find_matches and find_earlier; join_matches to a search of 4x5; observe_matches of trees of
    12 nodes; enter_answers."""
    found = MatchBuffers(requests, paths, depth, tokens, "cpu")
    entries = torch.zeros(requests, dtype=torch.int64)
    text, of_slots = integers(requests, tokens), integers(requests)
    find_matches(text, of_slots, entries, 32_000, found)
    probabilities, temperatures = torch.zeros(2, MATCH_CLASSES, depth), torch.zeros(requests)
    texts = text, of_slots, integers(2, requests + 1)
    store = AnswerStore.empty(texts, (10_000, 1 << 20), seed=0)
    find_earlier(entries, temperatures, probabilities, 32_000, store, found)
    enter_answers(of_slots, store)
    nodes, scores = torch.zeros(requests, 5, 4, dtype=torch.int64), torch.zeros(requests, 5, 4)
    joined = JoinedBuffers(requests, (4, 5), (paths, depth), "cpu")
    searched = SearchedNodes(nodes, nodes, scores, scores)
    join_matches(searched, found, probabilities, temperatures, joined)
    tree = integers(requests, 13)
    observe_matches(
        entries,
        tree,
        VerifiedTrees(tree, tree, tree, integers(requests), tree, temperatures),
        256.0,
        torch.zeros(2, MATCH_CLASSES, depth, 2),
        probabilities,
        torch.zeros(4, dtype=torch.int64),
    )


DRAFTS = (
    *(draft_level, recurrent_layer, learn, match, candidates),
    *(gated_layers, partial(gated_layers, 4)),
    *(partial(speculator_cells, *sizes) for sizes in ((1, HIDDEN), (2, HIDDEN), (2, WIDEST))),
)
"""All of a draft's."""


def step(slots: int, requests: int = 2) -> None:
    """admit_nodes, stage_trees, add_depths, accept_path, compact_kv, gather_path, load_drafts."""
    table, staged = TreeBuffers(4, slots - 1, "cpu"), StagedTrees(4, slots - 1, "cpu")
    rows = requests * slots
    most, of_batch = 8192 // (slots - 1), torch.zeros(requests, dtype=torch.int64)
    starts, confidences = integers(most + 1), torch.zeros(most, slots)
    admit_nodes(confidences, of_batch, integers(2, requests), 1, 2, starts, starts)
    stage_trees(
        table,
        of_batch,
        integers(requests + 1),
        integers(requests + 1),
        integers(requests),
        torch.zeros(rows, dtype=torch.int64),
        staged,
        requests,
    )
    add_depths(staged, integers(requests + 1), torch.zeros(3, rows + 1, dtype=torch.int64))
    path, num_sampled, row_start = integers(requests, slots), integers(requests), integers(requests)
    of_rows, slot_of = torch.zeros(2, rows, dtype=torch.int64)
    last_rows, counts = torch.zeros(2, max(requests, 3), dtype=torch.int64)
    accept_path(
        staged,
        SampledRows(integers(requests + 1), of_rows, integers(requests), slot_of, integers(4)),
        of_rows,
        AcceptedPaths(
            integers(requests, slots), num_sampled, integers(requests), path, last_rows, counts
        ),
        slice(0, requests),
    )
    caches = [torch.zeros(8, 8, 16, 256, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2)]
    compact_kv(
        CacheTable.of(caches), path, num_sampled, row_start, torch.zeros(rows, dtype=torch.int64)
    )
    state, numbers = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16), torch.zeros(requests)
    gather_path(path, row_start, [of_rows, integers(rows), state])
    load_drafts(
        StepEnd(
            *(slot_of[:requests], last_rows, integers(requests + 1), num_sampled),
            *(last_rows, numbers),
        ),
        [state],
        DraftInputs(torch.zeros_like(state), last_rows, last_rows, num_sampled, numbers),
        requests,
        requests,
    )


def build(width: int, length: int, requests: int = 2) -> None:
    """build_tree."""
    root_tokens = torch.zeros(requests, dtype=torch.int64)
    build_tree(
        root_tokens,
        torch.zeros(requests, length, width, dtype=torch.int64),
        torch.zeros(requests, length, width, dtype=torch.int64),
        torch.zeros(requests, length, width),
        ScoredTrees(requests, 127, "cpu"),
        entries=root_tokens,
        log_odds=torch.zeros(requests, length, width),
        node_limits=NodeLimits(integers(requests), integers(requests)),
        drafts=torch.zeros(requests, 127, dtype=torch.int64),
        match_classes=integers(requests, length, width),
    )
