"""What the demo prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_redrafter.data.repetition import NGRAM, repeated_share
from vllm_redrafter.demo.decoding import LevelResult

DRAFTED = "bold green"


def print_comparison(
    console: Console, plain: Sequence[LevelResult], drafted: Sequence[LevelResult]
) -> None:
    """The same prompts without and with ReDrafter, for each number of requests at once."""
    table = Table(title="Greedy decoding in vLLM, float32, tokens per second")
    for column in ("requests at once", "plain", "ReDrafter", "speed-up", "tokens per target step"):
        table.add_column(column, justify="right")
    table.add_column("outputs identical")
    for before, after in zip(plain, drafted, strict=True):
        ratio = after.tokens_per_second / before.tokens_per_second
        table.add_row(
            str(before.in_flight),
            f"{before.tokens_per_second:.0f}",
            f"{after.tokens_per_second:.0f}",
            f"{ratio:.2f}×",
            f"{after.tokens_per_target_step:.2f}",
            identical(before, after),
        )
    console.print(table)
    answers = plain[-1].tokens()
    console.print(
        f"{len(answers)} answers, {sum(map(len, answers))} tokens; "
        f"{repeated_share(answers):.0%} of their {NGRAM}-grams repeat an earlier one of the same "
        "answer (text that repeats itself is easy to draft)."
    )


def identical(before: LevelResult, after: LevelResult) -> str:
    """`yes`, or how many answers are."""
    pairs = list(zip(before.tokens(), after.tokens(), strict=True))
    equal = sum(a == b for a, b in pairs)
    return "yes" if equal == len(pairs) else f"no: {equal} of {len(pairs)}"


def print_answer(
    console: Console, tokenizer: Any, prompt: Sequence[int], steps: Sequence[Sequence[int]]
) -> None:
    """One answer; its accepted draft tokens are coloured.

    Args:
        console: where to.
        tokenizer: the target's.
        prompt: token ids.
        steps: the tokens of each engine step; all but a step's last one were drafted.
    """
    pieces: list[tuple[list[int], str]] = [(list(prompt), "dim")]
    for step in steps:
        pieces += [(list(step[:-1]), DRAFTED), (list(step[-1:]), "")]
    text, done, shown = Text(), "", []
    for tokens, style in pieces:
        # Byte-level tokens may be parts of a character: decode all, and show what is new.
        shown += tokens
        decoded = tokenizer.decode(shown, skip_special_tokens=True)
        text.append(decoded[len(done) :], style)
        done = decoded
    num_drafted = sum(len(step) - 1 for step in steps)
    num_tokens = sum(map(len, steps))
    console.print(Panel(text, title=f"one answer; [{DRAFTED}]accepted draft tokens[/]"))
    console.print(
        f"{num_drafted} of its {num_tokens} tokens were drafted, in {len(steps)} target steps"
    )
