# SPDX-License-Identifier: Apache-2.0
"""What the demo prints."""

import io
import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from vllm_redrafter.cli.demo.decoding import LevelResult
from vllm_redrafter.cli.demo.report import (
    ShownAnswer,
    all_identical,
    identical,
    print_answers,
    print_comparison,
)


def levels() -> tuple[LevelResult, LevelResult]:
    plain = LevelResult(1, [2.0], [[[5], [6], [7], [8]]], {})
    drafted = LevelResult(1, [1.0], [[[5], [6, 7, 8]]], {"sampled_tokens": 3, "verifications": 1})
    return plain, drafted


def printed(console: Console) -> str:
    """Without colours and frames, in one line."""
    assert isinstance(console.file, io.StringIO)
    return " ".join(re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue()).split())


DRAFTED_CODE, MATCHED_CODE = "32", "36"


def tinted(console: Console, code: str = DRAFTED_CODE) -> list[str]:
    """The characters of this colour, those of the legend left out."""
    assert isinstance(console.file, io.StringIO)
    return re.findall(rf"\x1b\[{code}m(.)\x1b\[0m", console.file.getvalue())


class Letters:
    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in tokens)


def colours(**arguments: Any) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        color_system="standard",
        **{"width": 80} | arguments,
    )


def test_report_says_what_was_measured() -> None:
    plain, drafted = levels()
    assert plain.tokens_per_second == 2.0 and plain.tokens_per_target_step == 1.0
    assert drafted.tokens_per_target_step == 3.0
    assert identical(plain, drafted) == "yes" and all_identical([plain], [drafted])
    other = LevelResult(1, [1.0], [[[5], [6, 7, 9]]], {})
    assert identical(plain, other) == "no: 0 of 1" and not all_identical([plain], [other])
    console = Console(file=io.StringIO(), width=120)
    print_comparison(console, [plain], [drafted], "float32")
    assert "2.00×" in printed(console) and "3.00" in printed(console)
    assert "float32" in printed(console)


def test_accepted_tokens_are_told_from_the_targets_own() -> None:
    console = colours()
    answer = ShownAnswer.of([*b"def "], [[*b"f"], [*b"(ab"], [*b")"]], context_matches=0)
    print_answers(console, Letters(), [""], [answer], context_matches=0)
    assert isinstance(console.file, io.StringIO)
    assert tinted(console) == [*"(a"]
    assert "2 of its 5 tokens were drafted, in 3 target steps" in printed(console)
    assert "found" not in printed(console)


def test_tokens_that_were_found_in_the_text_have_a_colour_of_their_own() -> None:
    console = colours(width=120)
    answer = ShownAnswer.of([*b"a=b;"], [[*b"a"], [*b"=bxy"]], context_matches=1)
    print_answers(console, Letters(), [""], [answer], context_matches=1)
    assert tinted(console, MATCHED_CODE) == [*"=b"] and tinted(console) == ["x"]
    assert "3 of its 5 tokens were drafted, 2 of them found in the text, in 2" in printed(console)
    assert "this one was found in the text" in printed(console)


def test_each_answer_stands_below_its_question() -> None:
    console = colours()
    steps = [[*b"so"]], [[*b"1"], [*b"23"]]
    answers = [ShownAnswer.of([], answer, context_matches=0) for answer in steps]
    print_answers(console, Letters(), ["why?", "how [many]?"], answers, context_matches=0)
    assert "2" in tinted(console)
    text = printed(console)
    assert "> why? so 1 of its 2 tokens were drafted, in 1 target steps" in text
    assert "> how [many]? 123 1 of its 3 tokens were drafted, in 2 target steps" in text
