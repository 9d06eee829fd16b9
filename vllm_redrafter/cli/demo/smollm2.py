# SPDX-License-Identifier: Apache-2.0
"""The demo, in order: SmolLM2-135M-Instruct, two engines, what they answer and how fast."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, cycle, groupby, islice
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_redrafter.checkpoints.fit import misfits_of, require_fit
from vllm_redrafter.checkpoints.reading import Checkpoint, shape_of
from vllm_redrafter.checkpoints.shipped import shipped_drafter
from vllm_redrafter.cli.chat.conversation import DRAFTED, FOUND, marked
from vllm_redrafter.cli.demo.comparison import CANDIDATES, NEAR, Parting, parting, verdict
from vllm_redrafter.cli.demo.engine import Decoded, Round, vllm_process
from vllm_redrafter.cli.demo.smollm2_target import get_target
from vllm_redrafter.data.conversation_rows import Conversation
from vllm_redrafter.data.target import EmbeddedTokens, Target
from vllm_redrafter.data.turns import PromptRenderer
from vllm_redrafter.engine.vllm_interface import ISSUES
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.processor import fast_dtype
from vllm_redrafter.utils.progress import progress_bar

NAME = "smollm2-135m-instruct"
"""Of the target's folder in the cache, and of its drafter in the package."""
LEVELS = [1, 4, 8]
"""Requests at once."""
MAX_TOKENS = 64
"""Of an answer."""
MAX_NODES = 12
"""Where the checkpoint records no shape."""
PROMPTS = [
    "What is photosynthesis? Answer in one sentence.",
    "Give me three tips for sleeping better.",
    "Summarize this text: The library in our town opened in 1911 in a former mill. For decades it "
    "lent books to the workers of the factories nearby. When the factories closed, fewer people "
    "came, and in 1985 the council wanted to sell the building. Readers collected four thousand "
    "signatures against the plan. Today it is open every day.",
    "Write a Python function that checks whether a number is prime.",
]
WHY_NEAR_TIES = (
    "At a near-tie the two tokens are at most {near} apart by plain vLLM's own log-probabilities, "
    "which is within {dtype}'s rounding. A step that computes more tokens at once rounds "
    "differently, and may choose the other one. So does plain vLLM at another number of requests."
)
FAULT = (
    "an answer is not plain vLLM's, and no near-tie explains it. Unless the target's largest "
    f"logits exceed 32, that is a fault of ReDrafter: please report what is printed above: {ISSUES}"
)


def run_demo(
    cache_dir: Path,
    target: str | None = None,
    drafter: str | None = None,
    console: Console | None = None,
) -> None:
    """Run the whole demo; `cache_dir` keeps the target and the engines' logs.

    Raises:
        ConfigError: the target cannot be had, the drafter does not fit, no engine works, or an
            answer parts from plain vLLM's where there is no near-tie.
    """
    console = console or Console()
    folder = cache_dir.expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if target is None:
        target = str(folder / NAME)
        get_target(folder / NAME, console)
    opened, speculation = pair_of(target, drafter)
    dtype = str(fast_dtype()).removeprefix("torch.")
    prompts = prompts_of(opened, PROMPTS)
    rounds = [each for level in LEVELS for each in _rounds(level, prompts)]
    shown, near = Round(prompts, MAX_TOKENS, 1, is_recorded=True), NEAR[dtype]
    start = partial(vllm_process, folder, target=target, dtype=dtype, max_num_seqs=LEVELS[-1])
    with progress_bar(console) as progress, start() as plain, start(speculation) as drafting:
        engines = {"without": plain, "with": drafting}
        task = progress.add_task("vLLM", total=2 * len(rounds) + 2, status="", due=inf)

        def decode(which: str, batch: Round) -> Decoded:
            status = f"{which} ReDrafter, {batch.in_flight} at once"
            progress.update(task, status=status, due=0.0)  # in a file, a line for each round
            decoded = engines[which](batch)
            progress.advance(task)
            return decoded

        # In turn: what else the machine does falls on both.
        pairs = [[decode(which, each) for which in engines] for each in rounds][1::2]
        pairs.append([pairs[0][0], decode("with", shown)])
        texts = [[[[*chain(*steps)] for steps in each.answers] for each in pair] for pair in pairs]
        partings = [[*map(parting, cycle(prompts), *pair)] for pair in texts]
        points = [each.prompt for each in chain(*partings) if each]
        asked = decode("without", Round(points, 1, LEVELS[-1], CANDIDATES))
        progress.update(task, status="rounds")
    told = iter(asked.candidates)
    partings = [[each and replace(each, candidates=next(told)) for each in of] for of in partings]

    _print_comparison(console, dtype, pairs[:-1])
    console.print("Answers, beside plain vLLM's:")
    for level, of_level in zip(LEVELS, partings[:-1], strict=True):
        console.print(f"{level:2} at once: {verdict(of_level, near)}", highlight=False)
    if any(each.apart <= near for each in chain(*partings) if each):
        console.print(WHY_NEAR_TIES.format(dtype=dtype, near=near))
    answers, sources = pairs[-1][1].answers, pairs[-1][1].sources
    legend = [marked("tokens like these", console), Text(" were drafted and accepted")]
    if "match" in chain(*sources):
        legend += Text(", "), marked("these", console, FOUND), Text(" found in the text")
    console.print(Text.assemble("\nThe answers; ", *legend))
    for each in zip(PROMPTS, answers, sources, partings[-1], strict=True):
        _print_answer(console, opened.tokenizer, *each)
    console.print(f"\nThe target and the engines' logs are in {folder}")
    if any(each.apart > near for each in chain(*partings) if each is not None):
        raise ConfigError(FAULT)


def pair_of(target: str, drafter: str | None) -> tuple[Target, dict[str, Any]]:
    """A target, and the speculative config of its drafter, or of the shipped one.

    Raises:
        ConfigError: the drafter does not fit.
    """
    checkpoint = Checkpoint.open(drafter or str(shipped_drafter(NAME)))
    opened = Target.open(target)
    misfits = misfits_of(checkpoint.head, opened.config)
    require_fit(f"the drafter {checkpoint.model!r}", target, misfits)
    speculation = {"num_speculative_tokens": MAX_NODES, **shape_of(checkpoint.values)}
    # A prompt is decoded several times: its answer must not come from the last time's.
    speculation |= {"model": os.path.expanduser(checkpoint.model), "earlier_answers": 0}
    return opened, speculation


def prompts_of(target: Target, questions: Sequence[str]) -> list[list[int]]:
    """Token ids: by the target's chat template, or as mere text where it has none.

    Raises:
        ConfigError: the target has no embedding of one of them.
    """
    renderer = PromptRenderer(target.tokenizer, EmbeddedTokens(target.tokenizer, target.vocab_size))
    return [renderer.prompt(Conversation((question,)), []) for question in questions]


def _rounds(level: int, prompts: list[list[int]]) -> list[Round]:
    """A warm-up, and what is timed: three prompts per request keep the batch full for longer."""
    batch = list(islice(cycle(prompts), max(len(prompts), 3 * level)))
    return [Round(batch, MAX_TOKENS // 2, level), Round(batch, MAX_TOKENS, level)]


def _print_comparison(console: Console, dtype: str, pairs: Sequence[Sequence[Decoded]]) -> None:
    table = Table(title=f"Greedy decoding in vLLM, {dtype}, tokens per second")
    for column in ("requests at once", "plain", "ReDrafter", "speed-up", "tokens per target step"):
        table.add_column(column, justify="right")
    for level, pair in zip(LEVELS, pairs, strict=True):
        rates = [sum(map(len, chain(*each.answers))) / each.seconds for each in pair]
        # The first step of an answer is its prompt's.
        sizes = [len(step) for answer in pair[1].answers for step in answer[1:]]
        table.add_row(
            str(level),
            *(f"{rate:.0f}" for rate in rates),
            f"{rates[1] / rates[0]:.2f}×",
            f"{sum(sizes) / len(sizes):.2f}" if sizes else "–",
        )
    console.print(table)


def _print_answer(
    console: Console,
    tokenizer: Any,
    question: str,
    steps: Sequence[Sequence[int]],
    sources: Sequence[str],
    where: Parting | None,
) -> None:
    """A question and its answer, whose accepted draft tokens are marked."""
    styles = {"match": FOUND, "drafter": DRAFTED}
    text, done, shown = Text(), "", list[int]()
    for source, run in groupby(zip(sources, chain(*steps), strict=True), itemgetter(0)):
        # Byte-level tokens may be parts of a character: decode all, and show what is new.
        shown += [token for _, token in run]
        decoded = tokenizer.decode(shown, skip_special_tokens=True)
        new = decoded[len(done) :]  # a Text leaves control characters out
        text.append(marked(new, console, styles[source]) if source in styles else Text(new))
        done = decoded
    console.print(Text(f"\n> {question}", style="bold"))
    console.print(text, "…" if len(shown) == MAX_TOKENS else "")
    counted = Counter(sources)
    said = f"{len(shown) - counted['target']} of its {len(shown)} tokens were drafted"
    said += f" ({counted['match']} of them found in the text)" if counted["match"] else ""
    said += f", in {len(steps)} target steps; "
    said += f"parts from plain vLLM at {where}" if where else "equal to plain vLLM"
    console.print(said, style="dim")
