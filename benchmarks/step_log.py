# SPDX-License-Identifier: Apache-2.0
r"""Where each step's time goes, on the host and on the GPU, without a profiler.

    python benchmarks/step_log.py --model TARGET --drafter DRAFTER --output ours.json
    python benchmarks/step_log.py --model TARGET --output plain.json
    TORCH_LOGS=recompiles python benchmarks/step_log.py ...

One engine on Model Runner V2, in this process and on one GPU; plain decoding without --drafter. A
level answers random prompts, three per request in flight, with 24 to 96 tokens each: requests begin
where others end, so that steps read prompts beside decoding. It does so twice, and the second time
is logged. Of each step the file has

    kind        decode, prompts (all requests are new) or mixed, `pieces` where the graph is
                piecewise; requests, rows and nodes
    period      ms from its schedule to the next one's
    host        ms of phases, some of which are inside others. `waited` is in synchronisations with
                events: where that is next to nothing, the host sets the pace
    device      ms by events: the pass from its graph's launch on, what comes after, and the whole

and the table has medians by kind. Then ReDrafter's own counters are taken, in runs of their own as
they cost time: nodes, tokens that came and that were expected, seconds by part.
"""

import os
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise, product
from statistics import median
from threading import current_thread, main_thread
from time import perf_counter
from typing import Any

from rich.table import Table
from shared_parts import machine, results
from shared_parts.arguments import json_object, not_negative, positive, script_parser
from throughput_parts.engine import Generation, generate

PROMPTS_PER_REQUEST, LEAST_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 3, 8, 53, (24, 96)
SHAPE = {"num_speculative_tokens": 12, "beam_width": 4, "beam_length": 5}

PHASES = "schedule", "execute_model", "sample_tokens", "update_from_output"
"""Of a step's host, one after the other; all others are inside them."""
OF_RUNNER = "add_requests", "gather_batch_req_state", "prepare_inputs", "prepare_attn", "sample"
OF_BUDGET = "get_num_tokens", "reallocate_drafts", "record_confidences"
GRAPHS = "run_fullgraph", "run_pw_graph"
DEVICE = {"pass": ("pass", "passed"), "after": ("passed", "end"), "whole": ("begin", "end")}
"""Spans of time between marks."""

Record = dict[str, Any]


class StepLog:
    """Wraps methods of the engine in this process; `steps` are recorded from then on."""

    def __init__(self, llm: Any) -> None:
        import torch

        self.steps: list[Record] = []
        self._cuda: Any = torch.cuda if torch.cuda.is_available() else None
        core = llm.llm_engine.engine_core.engine_core
        self._runner = runner = core.model_executor.driver_worker.worker.model_runner
        self._time(core.scheduler, "schedule", then=self._begin)
        self._time(core.scheduler, "update_from_output")
        self._time(runner, "execute_model", then=self._passed, mark="begin")
        self._time(runner, "sample_tokens", then=lambda _: self._mark("end"))
        budget = getattr(runner, "adaptive_verification", None)
        for owner, names in ((runner, OF_RUNNER), (runner.speculator, ["propose"])):
            for name in names if owner is not None else ():
                self._time(owner, name)
        for name in OF_BUDGET if budget is not None else ():
            self._time(budget, name)
        for name in GRAPHS if runner.cudagraph_manager is not None else ():
            self._time(runner.cudagraph_manager, name, mark="pass")
        if self._cuda:
            self._time(torch.cuda.Event, "synchronize", phase="waited")

    def read(self) -> list[Record]:
        """The steps since the last call, but for the last of them, whose period is not known."""
        if self._cuda:
            self._cuda.synchronize()
        for step, after in pairwise(self.steps):
            step["period"] = 1e3 * (after["began"] - step["began"])
            step["kind"] += ", pieces" if "run_pw_graph" in step["host"] else ""
            marks = step.pop("marks")
            step["device"] = {
                name: marks[first].elapsed_time(marks[last])
                for name, (first, last) in DEVICE.items()
                if first in marks and last in marks
            }
        read, self.steps = self.steps[:-1], []
        return read

    def _time(
        self,
        owner: Any,
        name: str,
        then: Callable[[Any], None] | None = None,
        mark: str | None = None,
        phase: str | None = None,
    ) -> None:
        """Add what calls of `owner.name` take to the step's phase, by default of that name.

        `then` is given what a call returns; `mark` is set before it.
        """
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if mark is not None:
                self._mark(mark)
            began = perf_counter()
            returned = call(*args, **kwargs)
            taken = 1e3 * (perf_counter() - began)
            if then is not None:
                then(returned)
            # Not of the thread in which vLLM waits for outputs.
            if self.steps and current_thread() is main_thread():
                host = self.steps[-1]["host"]
                host[phase or name] = host.get(phase or name, 0.0) + taken
            return returned

        setattr(owner, name, timed)

    def _begin(self, scheduled: Any) -> None:
        new = len(scheduled.scheduled_new_reqs)
        decoding = len(scheduled.num_scheduled_tokens) - new
        kind = ("mixed" if decoding else "prompts") if new else "decode"
        step = {"kind": kind, "new": new, "decoding": decoding, "host": {}, "marks": {}}
        self.steps.append({**step, "began": perf_counter()})

    def _passed(self, _: Any) -> None:
        self._mark("passed")
        state = self._runner.execute_model_state
        if state is not None and self.steps:
            batch = state.input_batch
            self.steps[-1] |= {"rows": batch.num_tokens, "nodes": int(batch.num_draft_tokens)}

    def _mark(self, name: str) -> None:
        if self._cuda and self.steps:
            event = self.steps[-1]["marks"][name] = self._cuda.Event(enable_timing=True)
            event.record()


def answered(llm: Any, prompts: list[list[int]], requests: int, **sampling: Any) -> Generation:
    """The first prompts, so many requests at a time; lengths are the same in every call."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    asked = prompts[: max(LEAST_PROMPTS, PROMPTS_PER_REQUEST * requests)]
    drawn = random.Random(0)
    kind = RequestOutputKind.DELTA
    given = partial(SamplingParams, ignore_eos=True, detokenize=False, output_kind=kind)
    params = [given(max_tokens=drawn.randint(*OUTPUT_TOKENS), **sampling) for _ in asked]
    return generate(llm, asked, params, requests)


def measured(llm: Any, log: StepLog, prompts: list[list[int]], level: Record) -> Record:
    """The level's record, with its steps."""
    answered(llm, prompts, **level)
    log.read()
    made = answered(llm, prompts, **level)
    rate = sum(map(len, made.outputs)) / made.seconds
    return {**level, "tokens_per_second": rate, "steps": log.read()}


def counted(llm: Any, prompts: list[list[int]], level: Record) -> Record:
    """ReDrafter's counters at the level; from the first call on, steps take longer."""
    llm.collective_rpc("reset_redrafter_stats")
    answered(llm, prompts, **level)
    return {**level, **llm.collective_rpc("redrafter_stats")[-1]}


def table(levels: Iterable[Record]) -> Table:
    """Medians of each kind of step at each level."""
    drawn = Table(caption="ms; host: all of its phases but waiting; pass, after, whole: device")
    figures = ("rows", "period", "host", "waited", *PHASES, *DEVICE)
    for name in ("T", "requests", "tok/s", "kind", "steps", *figures):
        drawn.add_column(name, justify="right")
    for level in levels:
        at = [f"{level[name]:.4g}" for name in ("temperature", "requests", "tokens_per_second")]
        for kind in sorted({step["kind"] for step in level["steps"]}):
            found = []
            for step in level["steps"]:
                if step["kind"] == kind:
                    phases = {**step["host"], **step["device"]}
                    host = sum(phases.get(name, 0) for name in PHASES) - phases.get("waited", 0)
                    found.append({**step, **phases, "host": host})
            drawn.add_row(*at, kind, str(len(found)), *(_median(found, name) for name in figures))
    return drawn


def _median(steps: Sequence[Record], name: str) -> str:
    values = [step[name] for step in steps if name in step]
    return f"{median(values):.4g}" if values else "–"


def main(argv: Sequence[str] | None = None) -> None:
    command = script_parser(__doc__, output="write all steps to this JSON file")
    add = command.add_argument
    add("--model", required=True, help="the target: folder or hub id")
    add("--drafter", help="the ReDrafter checkpoint (default: plain decoding)")
    add("--requests", nargs="+", type=positive, default=[1, 16, 64], help="(default 1 16 64)")
    add("--temperature", nargs="+", type=not_negative, default=[0.0, 0.7], help="(default 0 0.7)")
    add("--top-p", type=not_negative, default=1.0, help="(default 1)")
    add("--speculative", type=json_object, default={}, help="more of the speculative config")
    add("--engine-args", type=json_object, default={}, help="more arguments of vllm.LLM")
    options = command.parse_args(argv)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    import torch
    from vllm import LLM

    most = max(options.requests)
    engine: Record = {"dtype": "bfloat16", "max_model_len": 512, "enable_prefix_caching": False}
    if options.drafter:
        config = {"model": options.drafter, **SHAPE, **options.speculative}
        engine["speculative_config"] = config
    llm = LLM(options.model, **{"max_num_seqs": most, "seed": 0, **engine, **options.engine_args})
    drawn, tokens = random.Random(1), range(5, llm.model_config.get_vocab_size())
    count = max(LEAST_PROMPTS, PROMPTS_PER_REQUEST * most)
    prompts = [drawn.choices(tokens, k=PROMPT_TOKENS) for _ in range(count)]
    levels = [
        {"temperature": temperature, "requests": requests, "top_p": options.top_p}
        for temperature, requests in product(options.temperature, options.requests)
    ]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    record: Record = {**machine.describe(gpu), "levels": [], "counters": []}
    log = StepLog(llm)
    for level in levels:
        record["levels"].append(measured(llm, log, prompts, level))
        results.write(options.output, record)
    results.wide_console().print(table(record["levels"]))
    for level in levels if options.drafter else ():
        record["counters"].append(counted(llm, prompts, level))
        results.write(options.output, record)


if __name__ == "__main__":
    main()
