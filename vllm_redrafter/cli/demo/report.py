# SPDX-License-Identifier: Apache-2.0
"""What the demo prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_redrafter.cli.accepted import colours, legend, matched_of_steps
from vllm_redrafter.cli.demo.decoding import LevelResult

WHY_NOT_IDENTICAL = (
    "In bfloat16 the two best tokens are now and then equal, or a rounding apart, and a step that "
    "computes more tokens at once rounds otherwise: then either may be taken, and the answer goes "
    "on from there. So it is without ReDrafter, at other numbers of requests. In float32 this is "
    "rare."
)


def print_comparison(
    console: Console,
    plain: Sequence[LevelResult],
    drafted: Sequence[LevelResult],
    dtype: str,
    engine: str = "vLLM",
) -> None:
    """The same prompts without and with ReDrafter, for each number of requests at once."""
    table = Table(title=f"Greedy decoding in {engine}, {dtype}, tokens per second")
    for column in ("requests at once", "plain", "ReDrafter", "speed-up", "tokens per target step"):
        table.add_column(column, justify="right")
    table.add_column("outputs identical")
    for before, after in zip(plain, drafted, strict=True):
        table.add_row(
            str(before.in_flight),
            f"{before.tokens_per_second:.0f}",
            f"{after.tokens_per_second:.0f}",
            f"{after.speed_up(before):.2f}×",
            f"{after.tokens_per_target_step:.2f}",
            identical(before, after),
        )
    console.print(table)


def all_identical(plain: Sequence[LevelResult], drafted: Sequence[LevelResult]) -> bool:
    return all(p.tokens() == d.tokens() for p, d in zip(plain, drafted, strict=True))


def identical(before: LevelResult, after: LevelResult) -> str:
    """`yes`, or how many answers are."""
    pairs = list(zip(before.tokens(), after.tokens(), strict=True))
    equal = sum(a == b for a, b in pairs)
    return "yes" if equal == len(pairs) else f"no: {equal} of {len(pairs)}"


@dataclass(frozen=True)
class ShownAnswer:
    """An answer, and where its tokens come from.

    Attributes:
        steps: the tokens of each engine step; all but a step's last one were drafted.
        matched: of each step, how many were found in the text; they are its first ones.
    """

    steps: Sequence[Sequence[int]]
    matched: Sequence[int]

    @classmethod
    def of(
        cls, prompt: Sequence[int], steps: Sequence[Sequence[int]], context_matches: int
    ) -> ShownAnswer:
        """By the engine's setting `context_matches`."""
        return cls(steps, matched_of_steps(prompt, steps, context_matches))

    def __str__(self) -> str:
        """How many of its tokens were drafted."""
        num_drafted = sum(len(step) - 1 for step in self.steps)
        found = f", {sum(self.matched)} of them found in the text" if any(self.matched) else ""
        num_tokens = sum(map(len, self.steps))
        return (
            f"{num_drafted} of its {num_tokens} tokens were drafted{found}, in {len(self.steps)} "
            "target steps"
        )

    def coloured(self, tokenizer: Any) -> Text:
        pieces: list[tuple[int, str]] = []
        for step, matched in zip(self.steps, self.matched, strict=True):
            styles = colours(len(step), matched)
            pieces += zip(step, styles, strict=True)
        text, done = Text(), ""
        shown: list[int] = []
        for token, style in pieces:
            # Byte-level tokens may be parts of a character: decode all, and show what is new.
            shown.append(token)
            decoded = tokenizer.decode(shown, skip_special_tokens=True)
            text.append(decoded[len(done) :], style)
            done = decoded
        return text


def print_answers(
    console: Console,
    tokenizer: Any,
    questions: Sequence[str],
    answers: Sequence[ShownAnswer],
    context_matches: int,
) -> None:
    """Several answers, one below the other; accepted draft tokens are coloured.

    Args:
        console: where to.
        tokenizer: the target's.
        questions: what was asked, a text per answer.
        answers: one per question.
        context_matches: the engine's setting.
    """
    console.print(f"\nThe answers; {legend(context_matches)}")
    for question, answer in zip(questions, answers, strict=True):
        console.print()
        console.print(Text(f"> {question}", style="bold"))
        console.print(answer.coloured(tokenizer))
        console.print(str(answer), style="dim")
