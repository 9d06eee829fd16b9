"""A trace of ReDrafter's steps by vLLM's torch profiler, and the kernels that take most of it.

    cd benchmarks && python -m first_gpu_parts.profiler_trace --traces FOLDER --output kernels.json

A target of Llama-3-8B's shape with random weights, 8 requests, trees of 32 nodes in a fixed shape,
CUDA graphs: as step_cost.py has them. Chrome (chrome://tracing) and Perfetto show the trace.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from shared_parts import machine, results
from shared_parts.arguments import script_parser
from shared_parts.traces import busiest, read_events
from step_cost_parts.jobs import SHAPES, Job, engine_arguments, write_drafter, write_target

TARGET, NODES, BEAMS = "llama-3-8b", 32, (16, 5)
REQUESTS, CONTEXT = 8, 512
STEPS = 12
"""That each request can take: little of a random drafter's proposals is accepted."""
SHOWN = 12


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="the folder for the trace")
    parser.add_argument("--output", type=Path, help="write the kernels' times to this JSON file")
    options = parser.parse_args()
    record(options.traces.resolve())
    import torch  # only now: vLLM forks its processes while this one has not used the GPU

    traces = sorted(options.traces.rglob("*.json.gz"))
    kernels = busiest([read_events(trace) for trace in traces])
    results.write(
        options.output,
        {
            **machine.describe(torch.cuda.get_device_name()),
            "traces": [trace.name for trace in traces],
            "total_ms": round(sum(kernel["ms"] for kernel in kernels), 3),
            "kernels": kernels[:SHOWN],
        },
    )
    if not kernels:
        print("The profiler wrote no kernel.", file=sys.stderr)
        return 1
    for kernel in kernels[:SHOWN]:
        print(f"{kernel['ms']:9.2f} ms {kernel['calls']:6d} calls  {kernel['name']}")
    return 0


def record(traces: Path) -> None:
    """Run some steps under the profiler; an engine of its own process writes the trace."""
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(
            TARGET,
            str(write_target(TARGET, folder)),
            str(write_drafter(TARGET, folder, None)),
            NODES,
            *BEAMS,
            cases=[(REQUESTS, CONTEXT)],
            steps=STEPS,
        )
        arguments = engine_arguments(job)
        # A random drafter would not pay, and an adaptive engine not draft.
        arguments["speculative_config"]["adaptive"] = False
        llm = LLM(job.folder, profiler_config=profiler(traces), **arguments)
        params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, detokenize=False)
        llm.generate(prompts(), params, use_tqdm=False)  # to warm up
        llm.start_profile()
        llm.generate(prompts(), params, use_tqdm=False)
        llm.stop_profile()


def profiler(traces: Path) -> dict[str, Any]:
    """vLLM's settings; Python's call stacks would be most of the trace."""
    return {
        "profiler": "torch",
        "torch_profiler_dir": str(traces),
        "torch_profiler_with_stack": False,
    }


def prompts() -> Any:
    vocabulary = SHAPES[TARGET]["vocab_size"]
    return [
        {"prompt_token_ids": [(7919 * (i + 1) * (t + 1)) % vocabulary for t in range(CONTEXT)]}
        for i in range(REQUESTS)
    ]


if __name__ == "__main__":
    sys.exit(main())
