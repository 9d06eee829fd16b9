# SPDX-License-Identifier: Apache-2.0
r"""Kernels on a GPU: how near they are to reading and writing once what they must.

    python benchmarks/kernels.py --output kernels.json
    python benchmarks/kernels.py --hidden 4096 --rows 4 16 --requests 1 --contexts 512

A level of a draft reads weights for a few rows, so that a layer's time is their bytes over the
bandwidth, at best. Timed are, for bf16 weights of random numbers:

    cell        the gated head's cell, two norms and its gate included: one launch of ours
    its product one of as many bytes, x W^T with W [2 H, 2 H], by torch: what a library reaches
    block       a residual block of the gated head, with its norm: one launch of ours
    its product likewise, W [H, H]
    lstm        an LSTM speculator's cell of D = H, behind its product: one launch of ours
    candidates  128 of each of four depths of V = 32,768, chosen from logits that are there
    gathered    the products of their rows with a request's four beams: --rows / 4 requests
    ranked      the best four of them

and of a step of --requests, each with a tree of --nodes, the root counted:

    attention   of the heads of Llama-3-8B, bf16, K and V in scattered blocks of 16
    admitted    the nodes verified of 12 per request, three of them: what it moves takes no time
    loaded      hidden states and numbers that drafts start from
    linear      hidden states of accepted paths, a row up, for a drafter with a cache
    entered     an earlier answer of each request, of 256 tokens, as if all had finished at once
    found       paths from the newest 32 places where a text's last tokens stand in such answers

Every launch is replayed from a CUDA graph with the L2 cache flushed before; times are medians. GB/s
are of the weights' bytes alone, or those of logits where nothing else is read; of a step, of K and
V once, queries and output, or of all that is read and written.
"""

import argparse
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from rich.table import Table
from shared_parts import machine, results
from shared_parts.arguments import integer, positive, script_parser
from shared_parts.gpu import Gpu, software
from torch import Tensor

from vllm_redrafter.config import LONGEST_PATH, MAX_NODES, USUAL_CANDIDATES
from vllm_redrafter.heads.norm import EPSILON
from vllm_redrafter.tree.context_matches import LONGEST_EARLIER, MATCH_CLASSES
from vllm_redrafter.tree.earlier_answers import ANSWER_PLACES, EARLIER_PLACES, MOST_PLACES
from vllm_redrafter.tree.token_tree import TokenTree
from vllm_redrafter.triton_kernels.admit_nodes import admit_nodes
from vllm_redrafter.triton_kernels.candidates import choose_candidates, rank_candidates
from vllm_redrafter.triton_kernels.compact_kv import gather_path
from vllm_redrafter.triton_kernels.draft_layers import MAX_ROWS, Product, draft_layer
from vllm_redrafter.triton_kernels.earlier_answers import AnswerStore, enter_answers, find_earlier
from vllm_redrafter.triton_kernels.find_matches import MatchBuffers
from vllm_redrafter.triton_kernels.gated_layer import Rows, gated_cell
from vllm_redrafter.triton_kernels.gather_dot import gather_dot
from vllm_redrafter.triton_kernels.load_drafts import DraftInputs, StepEnd, load_drafts
from vllm_redrafter.triton_kernels.speculator_cell import speculator_cell
from vllm_redrafter.triton_kernels.tree_attention import TreeAttention

BEAMS, LENGTH = 4, 5
VOCABULARY = 32_768
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
DRAFTED, ADMITTED = 12, 3
"""Nodes per request."""


@dataclass(frozen=True)
class Timed:
    """What was timed."""

    launch: str
    case: str
    floor_bytes: int
    microseconds: float


def measured(gpu: Gpu, options: argparse.Namespace) -> Iterator[Timed]:
    """Each size of a level, then of a step."""
    for hidden, rows in product(options.hidden, options.rows):
        yield from of_weights(gpu, hidden, rows)
        yield from of_candidates(gpu, hidden, max(1, rows // BEAMS))
    for sizes in product(options.requests, options.contexts, options.nodes):
        yield of_attention(gpu, *sizes)
    for requests, hidden in product(options.requests, options.hidden):
        yield from between_graphs(gpu, requests, hidden)
    for requests in options.requests:
        yield from of_answers(gpu, requests)


def of_weights(gpu: Gpu, hidden: int, rows: int) -> Iterator[Timed]:
    """Cells, the block, and products of as many bytes."""
    case = f"H {hidden}, {rows} rows"
    x, out = normal(gpu, rows, hidden), normal(gpu, rows, hidden)
    weight, bias = normal(gpu, 2 * hidden, 2 * hidden), normal(gpu, 2 * hidden)
    small, of_small = weight[:hidden, :hidden].contiguous(), bias[:hidden]

    def cell() -> None:
        # Tokens and states are the same rows.
        gated_cell(Rows(x), Rows(x), weight, bias, out, EPSILON)

    def block() -> None:
        draft_layer(Product(x, small), out, bias=of_small, silu=True, residual=x, epsilon=EPSILON)

    for name, launch, joined, read in (
        ("cell", cell, torch.cat([x, x], dim=1), weight),
        ("block", block, x, small),
    ):
        yield Timed(name, case, read.nbytes, gpu.in_graph(launch))
        made = x.new_empty(rows, len(read))

        def library(joined: Tensor = joined, read: Tensor = read, made: Tensor = made) -> None:
            torch.mm(joined, read.t(), out=made)

        yield Timed("its product", case, read.nbytes, gpu.in_graph(library))
    in_order = torch.arange(rows, device=gpu.device)
    embedded, above = Rows(x, in_order), Rows(weight[:rows], in_order.int())
    projected, after = weight.view(hidden, -1)[:rows], torch.empty_like(above.x)

    def lstm() -> None:
        speculator_cell(embedded, projected, above, [of_small] * 4, after, 1.0, EPSILON)

    yield Timed("lstm", case, (1 + 4 + 1 + 2) * x.nbytes, gpu.in_graph(lstm))


def of_candidates(gpu: Gpu, hidden: int, requests: int) -> Iterator[Timed]:
    """The choice of candidates, and a level below the root."""
    rows, count = requests * BEAMS, USUAL_CANDIDATES
    case = f"H {hidden}, {rows} rows"
    logits = normal(gpu, LENGTH * requests, VOCABULARY)
    x, weight = normal(gpu, rows, hidden), normal(gpu, VOCABULARY, hidden)
    tokens = choose_candidates(logits, requests, count, BEAMS)[1][0]

    def gathered() -> Tensor:
        return gather_dot(x, weight, tokens, scale=x[0], epsilon=EPSILON)

    of_tokens = gathered()
    rows_read = tokens.numel() * hidden * weight.element_size()
    for name, launch, read in (
        ("candidates", lambda: choose_candidates(logits, requests, count, BEAMS), logits.nbytes),
        ("gathered", gathered, rows_read),
        ("ranked", lambda: rank_candidates(of_tokens, tokens, BEAMS), of_tokens.nbytes),
    ):
        yield Timed(name, case, read, gpu.in_graph(launch))


def of_attention(gpu: Gpu, requests: int, context: int, nodes: int) -> Timed:
    """A step's attention in one layer, of binary trees."""
    blocks, rows = -(-(context + nodes) // BLOCK_SIZE), requests * nodes
    query = normal(gpu, rows, HEADS, HEAD_DIM)
    keys, values = normal(gpu, 2, requests * blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    parents = ((torch.arange(nodes) - 1).clamp(min=0) // 2).expand(requests, -1)
    trees = TokenTree(parents, parents, parents, torch.full((requests,), nodes))
    given = {
        "block_table": torch.randperm(requests * blocks).int().view(requests, -1),
        "context_lens": torch.full((requests,), context, dtype=torch.int32),
        "query_start_loc": torch.arange(requests + 1, dtype=torch.int32) * nodes,
        "ancestors": trees.ancestors,
    }
    on_gpu = {name: of.to(gpu.device) for name, of in given.items()}
    step = TreeAttention(**on_gpu, max_nodes=nodes, max_context_len=context)
    out = torch.empty_like(query)
    taken = gpu.in_graph(lambda: step.attend(query, keys, values, out))
    cached = requests * (context + nodes) * 2 * KV_HEADS * HEAD_DIM * query.element_size()
    case = f"{requests} x {context}, nodes {nodes}"
    return Timed("attention", case, cached + 2 * query.nbytes, taken)


def between_graphs(gpu: Gpu, requests: int, hidden: int) -> Iterator[Timed]:
    """What is launched before the target's graph, and before the draft's."""
    case, rows = f"{requests} requests, H {hidden}", requests * (1 + DRAFTED)
    numbers = torch.arange(requests, device=gpu.device)
    starts, ends = torch.zeros(2, requests + 1, dtype=torch.int32, device=gpu.device)
    confidences = torch.rand(requests, 1 + DRAFTED, device=gpu.device)
    scheduled = torch.tensor([[DRAFTED], [1]], dtype=torch.int32, device=gpu.device)
    scheduled, budget = scheduled.repeat(1, requests), requests * ADMITTED
    given = confidences, numbers, scheduled, budget, requests + budget, starts, ends
    admitted = gpu.in_graph(lambda: admit_nodes(*given))
    moved = sum(part.nbytes for part in (confidences, numbers, scheduled, starts, ends))
    yield Timed("admitted", case, moved, admitted)
    of_request, states = ends[1:], normal(gpu, rows, hidden)
    temperatures, last = confidences[:, 0].contiguous(), numbers * (1 + DRAFTED)
    end = StepEnd(numbers, last, starts, of_request, numbers, temperatures)
    parts = states[:requests], last, last, of_request, temperatures
    out = DraftInputs(*(part.clone() for part in parts))

    def loaded() -> None:
        load_drafts(end, [states], out, requests, requests)

    moved = 2 * sum(part.nbytes for part in out)
    yield Timed("loaded", case, moved, gpu.in_graph(loaded))
    nodes = torch.arange(1, 2 + DRAFTED, device=gpu.device).int().clamp(max=DRAFTED)
    path, starts_of_trees = nodes.repeat(requests, 1), last.int()
    linear = gpu.in_graph(lambda: gather_path(path, starts_of_trees, [states]))
    yield Timed("linear", case, 2 * (DRAFTED - 1) * out.hidden.nbytes, linear)


def of_answers(gpu: Gpu, requests: int) -> Iterator[Timed]:
    """Of a few tokens over and over: a text's last ones stand in an answer at 32 places."""
    case, rows = f"{requests} requests", torch.arange(requests, device=gpu.device)
    text = (torch.arange(ANSWER_PLACES, device=gpu.device) % 8).int().repeat(requests, 1)
    texts = text, torch.full_like(text[:, 0], ANSWER_PLACES), text.new_zeros(2, requests + 1)
    store = AnswerStore.empty(texts, (requests, MOST_PLACES), seed=0)
    slots, entered = rows.int(), text.numel() * (4 + 8 + 3 * 8)
    yield Timed("entered", case, entered, gpu.in_graph(lambda: enter_answers(slots, store)))
    paths = MatchBuffers(requests, 2, LONGEST_PATH, ANSWER_PLACES, gpu.device)
    chances = torch.full((2, MATCH_CLASSES, LONGEST_PATH), 0.5, device=gpu.device)
    given = rows, torch.zeros(requests, device=gpu.device), chances, VOCABULARY, store, paths
    found = requests * EARLIER_PLACES * (8 + 4 + 4 * LONGEST_EARLIER)
    yield Timed("found", case, found, gpu.in_graph(lambda: find_earlier(*given)))


def normal(gpu: Gpu, *size: int) -> Tensor:
    """bf16."""
    generator = torch.Generator(gpu.device).manual_seed(0)
    return torch.randn(size, generator=generator, device=gpu.device).to(torch.bfloat16)


def table(found: Iterable[Timed], copy: float) -> Table:
    """The figures, for a person."""
    made = Table("launch", "case", title=f"A copy on the device: {copy:.0f} GB/s")
    for column in ("µs", "floor, µs", "GB/s", "of a copy's"):
        made.add_column(column, justify="right")
    for timed in found:
        times = timed.microseconds, timed.floor_bytes / copy / 1000
        rate = timed.floor_bytes / timed.microseconds / 1000
        rates = f"{rate:.0f}", f"{rate / copy:.0%}"
        made.add_row(timed.launch, timed.case, *(f"{time:.1f}" for time in times), *rates)
    return made


def main(argv: Sequence[str] | None = None) -> None:
    command = script_parser(__doc__)
    add = command.add_argument
    add("--hidden", nargs="+", type=positive, default=[2048, 4096], help="(default 2048 4096)")
    rows = "at most 64 (default 4 16 64)"
    add("--rows", nargs="+", type=integer(1, MAX_ROWS), default=[4, 16, 64], help=rows)
    add("--requests", nargs="+", type=positive, default=[1, 64], help="of a step (default 1 64)")
    contexts = "keys of each (default 512 4096)"
    add("--contexts", nargs="+", type=positive, default=[512, 4096], help=contexts)
    nodes = "of a tree (default 1 4 13)"
    add("--nodes", nargs="+", type=integer(1, MAX_NODES), default=[1, 4, 13], help=nodes)
    add("--repeats", type=positive, default=30, help="of each launch (default 30)")
    options = command.parse_args(argv)
    if not torch.cuda.is_available():
        command.error("torch finds no GPU, and nothing is timed without one")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        command.error("TRITON_INTERPRET is set: this would time the interpreter; unset it")
    gpu = Gpu(options.repeats)
    copy = gpu.copy_bandwidth()
    record: dict[str, Any] = {**machine.describe(gpu.name), **software()}
    record |= {"repeats": options.repeats, "copy_gb_per_s": copy, "launches": []}
    found = []
    for timed in measured(gpu, options):
        found.append(timed)
        record["launches"].append(asdict(timed))
        results.write(options.output, record)
    results.wide_console().print(table(found, copy))


if __name__ == "__main__":
    main()
