"""What the parts of a step cost on a CPU, beside what they must cost at least.

    python benchmarks/step_parts.py
    python benchmarks/step_parts.py --parts draft --vocab-size 49152 --hidden-size 576 \\
        --dtype bfloat16 --requests 1 8 --shapes 4x4 1x3 --output draft.json
    python benchmarks/step_parts.py --parts draft --head gated --candidates 128
    python benchmarks/step_parts.py --parts attention --contexts 200 2000 8000 --nodes 9

Random weights, queries and caches: times do not depend on them. Each repeat measures, one after
another, so that a machine whose speed drifts slows all of them. Figures are medians.

A draft:

- plain: beam search with torch's own products (training and `evaluate` run these);
- packed: the same search as the CPU engine runs it, on weights that vLLM packed;
- products: its packed products alone, one after another;
- bytes: what these and the gathered rows of candidates read, over the bandwidth of reading memory.

The floor is the larger of the last two. The embedding is the target's and counts for nothing
here: a row per node.

Tree attention, in all layers of a step:

- tree: a tree of so many nodes per request, as the CPU engine attends;
- chain: as many tokens in a row, in vLLM's own kernel, which knows no trees;
- bytes: K and V of all tokens over the bandwidth of reading memory.
"""

from __future__ import annotations

import argparse
from itertools import product

import torch
from cpu_parts import attention, draft
from shared_parts import machine, results
from shared_parts.arguments import beams, integer, positive, results_file, script_parser

from vllm_redrafter.heads.registry import NAMES

PARTS = ("draft", "attention")


def arguments() -> argparse.Namespace:
    smollm2 = attention.Layers()
    parser = script_parser(__doc__)
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--requests", type=positive, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=positive, default=30)
    parser.add_argument("--threads", type=positive, help="default: as many as torch takes")
    parser.add_argument("--output", type=results_file, help="write all figures to this JSON file")
    of_draft = parser.add_argument_group("draft")
    of_draft.add_argument(
        "--head",
        choices=list(NAMES),
        default="gated",
        help="by the names of `train --head` (default gated)",
    )
    of_draft.add_argument("--vocab-size", type=positive, default=8192)
    of_draft.add_argument("--hidden-size", type=positive, default=512)
    of_draft.add_argument(
        "--candidates",
        type=integer(0),
        default=0,
        help="tokens that nodes choose from, told once per draft; a recurrent or gated head has a "
        "selector then (default 0: the vocabulary, at every level)",
    )
    of_draft.add_argument(
        "--shapes", type=beams, nargs="+", default=[(4, 4), (1, 3)], metavar="WxL"
    )
    of_attention = parser.add_argument_group("attention", "the defaults are SmolLM2-135M's")
    of_attention.add_argument("--contexts", type=positive, nargs="+", default=[200, 2000])
    of_attention.add_argument("--nodes", type=positive, default=9, help="root counted")
    of_attention.add_argument("--layers", type=positive, default=smollm2.count)
    of_attention.add_argument("--heads", type=positive, default=smollm2.heads)
    of_attention.add_argument("--kv-heads", type=positive, default=smollm2.kv_heads)
    of_attention.add_argument("--head-size", type=positive, default=smollm2.head_size)
    args = parser.parse_args()
    if args.heads % args.kv_heads:
        parser.error(
            f"--heads {args.heads} is no multiple of --kv-heads {args.kv_heads}: give K and V "
            "heads that all serve equally many query heads"
        )
    return args


def draft_costs(args: argparse.Namespace) -> list[draft.Cost]:
    sizes = args.vocab_size, args.hidden_size, max(length for _, length in args.shapes)
    measured = draft.Draft(args.head, *sizes, args.candidates, getattr(torch, args.dtype))
    return [
        draft.measure(measured, requests, width, length, args.repeats)
        for requests, (width, length) in product(args.requests, args.shapes)
    ]


def attention_costs(args: argparse.Namespace) -> list[attention.AttentionCost]:
    heads = args.heads, args.kv_heads, args.head_size
    layers = attention.Layers(args.layers, *heads, getattr(torch, args.dtype))
    return [
        attention.measure(layers, requests, context, args.nodes, args.repeats)
        for requests, context in product(args.requests, args.contexts)
    ]


def settings(args: argparse.Namespace) -> dict[str, object]:
    """What was measured, of the parts that were."""
    shared = ("dtype", "repeats")
    of_draft = ("head", "vocab_size", "hidden_size", "candidates")
    of_draft = of_draft if "draft" in args.parts else ()
    of_attention = ("layers", "heads", "kv_heads", "head_size") if "attention" in args.parts else ()
    chosen = {name: getattr(args, name) for name in (*of_draft, *of_attention, *shared)}
    return {**chosen, "threads": torch.get_num_threads()}


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    record = {**machine.describe(None), "settings": settings(args)}
    if "draft" in args.parts:
        drafts = draft_costs(args)
        results.wide_console().print(draft.table(drafts))
        record["draft"] = [cost.as_json() for cost in drafts]
    if "attention" in args.parts:
        attended = attention_costs(args)
        results.wide_console().print(attention.table(attended))
        record["attention"] = [cost.as_json() for cost in attended]
    results.write(args.output, record)


if __name__ == "__main__":
    main()
