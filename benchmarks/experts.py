r"""What verifying costs a mixture of experts on this CPU, beside what was measured at start-up.

    python benchmarks/experts.py --output experts.json

The more rows a step has, the more experts it needs: a dense target reads all of its weights for a
single row, a mixture reads those of the chosen experts. The budget's curve of costs must show
that. A target with random weights and a drafter that knows nothing decode one request:

- steps: the forward pass and the logits of its steps, which verify `rows - 1` drafted nodes;
- curve: what the engine had measured for as many rows when it started;
- equal tokens: the same measurement where all rows are of one token, and so of the same experts.

Figures are milliseconds, the least of several, as in the curve: what disturbs only adds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.table import Table
from shared_parts import machine, results
from shared_parts.arguments import positive, script_parser

# The engine in this process: its worker is asked for times.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

Seconds = dict[int, list[float]]


def arguments() -> argparse.Namespace:
    parser = script_parser(__doc__)
    add = parser.add_argument
    add("--rows", type=positive, nargs="+", default=[1, 4, 8, 16], help="root counted")
    add("--hidden-size", type=positive, default=512)
    add("--layers", type=positive, default=8)
    add("--experts", type=positive, default=32, help="of a layer")
    add("--experts-per-row", type=positive, default=4)
    add("--expert-size", type=positive, default=512)
    add("--vocab-size", type=positive, default=8192)
    add("--tokens", type=positive, default=64, help="of an answer, for each number of rows")
    add("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    add("--output", type=Path, help="write all figures to this JSON file")
    return parser.parse_args()


def make_models(args: argparse.Namespace, folder: Path) -> tuple[Path, Path]:
    """Write a target of Qwen3-MoE's form, and a drafter."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from vllm_redrafter import save_drafter
    from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.layers,
        num_experts=args.experts,
        num_experts_per_tok=args.experts_per_row,
        moe_intermediate_size=args.expert_size,
        num_attention_heads=max(1, args.hidden_size // 64),
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2048,
    )
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    # Else what random attention adds, which is alike in all nodes, would hide which token it is.
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    model.save_pretrained(folder / "target")
    sizes = RecurrentConfig(args.vocab_size, args.hidden_size, args.hidden_size)
    save_drafter(RecurrentHead(sizes), folder / "drafter")
    return folder / "target", folder / "drafter"


def measured_curve(worker: Any, rows: list[int]) -> list[float]:
    """Seconds of the curve that the engine measured; from here on all trees are verified whole."""
    from vllm_redrafter.engine.cpu.drafting import FixedDrafting

    runner = worker.model_runner
    runner.drafting = FixedDrafting(runner.proposer)
    return [float(seconds) for seconds in runner.costs.verify_seconds(rows)]


def of_equal_tokens(worker: Any, rows: list[int]) -> list[float]:
    """Seconds of the passes that make the curve, with token 0 in all rows."""
    from vllm_redrafter.engine.cpu.costs import MOST_REPEATS, _target_pass

    runner = worker.model_runner
    runner.input_ids.gpu.zero_()

    def seconds(size: int) -> float:
        started = perf_counter()
        _target_pass(runner, size)
        return perf_counter() - started

    return [min(seconds(size) for _ in range(1 + MOST_REPEATS)) for size in rows]


def time_steps(worker: Any) -> Seconds:
    """Seconds of the target's passes from here on, by rows; the steps fill it."""
    runner, steps = worker.model_runner, defaultdict[int, list[float]](list)
    forward, compute_logits = runner._model_forward, runner.model.compute_logits
    spent = [0.0]

    def timed_forward(*args: Any, **kwargs: Any) -> Any:
        started = perf_counter()
        hidden = forward(*args, **kwargs)
        spent[0] = perf_counter() - started
        return hidden

    def timed_logits(hidden: Any) -> Any:
        started = perf_counter()
        logits = compute_logits(hidden)
        steps[hidden.shape[0]].append(spent[0] + perf_counter() - started)
        return logits

    runner._model_forward, runner.model.compute_logits = timed_forward, timed_logits
    return steps


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """Milliseconds by number of rows."""
    from vllm import LLM, SamplingParams

    target, drafter = make_models(args, folder)
    nodes = max(args.rows) - 1
    llm = LLM(
        str(target),
        dtype=args.dtype,
        skip_tokenizer_init=True,
        max_num_seqs=1,
        max_model_len=1024,
        speculative_config={"model": str(drafter), "num_speculative_tokens": max(nodes, 1)},
    )
    (curve,) = llm.collective_rpc(measured_curve, args=(args.rows,))
    (equal,) = llm.collective_rpc(of_equal_tokens, args=(args.rows,))
    (steps,) = llm.collective_rpc(time_steps)
    for rows in args.rows:
        params = SamplingParams(
            temperature=0,
            max_tokens=args.tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"redrafter.spec_tokens": rows - 1},
        )
        llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
    return [
        {
            "rows": rows,
            "steps": 1000 * min(steps[rows]),
            "curve": 1000 * in_curve,
            "equal_tokens": 1000 * of_equal,
        }
        for rows, in_curve, of_equal in zip(args.rows, curve, equal, strict=True)
    ]


def table(measured: list[dict[str, float]]) -> Table:
    shown = Table("rows", "steps, ms", "curve, ms", "curve / steps", "equal tokens, ms")
    for row in measured:
        numbers = row["steps"], row["curve"], row["curve"] / row["steps"], row["equal_tokens"]
        shown.add_row(str(row["rows"]), *(f"{number:.2f}" for number in numbers))
    return shown


def main() -> None:
    args = arguments()
    record = {**machine.describe(gpu=None), "settings": {**vars(args), "output": None}}
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(args, Path(folder))
    results.wide_console().print(table(measured))
    results.write(args.output, {**record, "measurements": measured})


if __name__ == "__main__":
    main()
