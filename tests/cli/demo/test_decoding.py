# SPDX-License-Identifier: Apache-2.0
"""Rounds, levels and turns, with engines that only write down what they are told."""

from collections.abc import Callable
from typing import Any

from vllm_redrafter.cli.demo.decoding import DecodingJob, LevelResult, decode_in_turns
from vllm_redrafter.cli.demo.engine_worker import Decoded, Round

JOB = DecodingJob("t", None, [[1]] * 100, 4, [1, 4, 8], 16, repeats=3)


class Engine:
    """Says that it took 1, 2, 3… seconds, and counts a verification for each."""

    def __init__(self, name: str, diary: list[tuple[str, Round]], has_stats: bool) -> None:
        self._name, self._diary, self._has_stats = name, diary, has_stats
        self._calls = 0

    def decode(self, asked: Round, on_answer: Callable[[], None]) -> Decoded:
        self._diary.append((self._name, asked))
        for _ in asked.prompts:
            on_answer()
        self._calls += 1
        stats: dict[str, Any] = {"sampled_tokens": 6, "verifications": 2, "draft": 0.5}
        return Decoded(float(self._calls), [[[self._calls]]], stats if self._has_stats else {})


def test_a_level_has_prompts_enough_to_keep_its_batch_full() -> None:
    assert [len(JOB.prompts_at(level)) for level in JOB.levels] == [4, 12, 24]
    assert JOB.decodings == (4 + 12 + 24) * 4


def test_where_prompts_are_few_they_are_asked_again() -> None:
    job = DecodingJob("t", None, [[1], [2], [3]], 4, [1, 2], 16, 0, 3, "float32", 8, 2)
    assert job.prompts_at(2) == [[1], [2], [3], [1], [2], [3], [1], [2]]
    few = DecodingJob("t", None, [[1], [2], [3]], 4, [1, 2], 16, 0, 3, "float32", 2, 2)
    assert few.prompts_at(1) == [[1], [2]]
    assert few.prompts_at(2) == [[1], [2], [3], [1]]


def test_rounds_go_through_all_engines_in_turns() -> None:
    diary: list[tuple[str, Round]] = []
    progress: list[tuple[int, int]] = []
    processes: Any = [Engine("plain", diary, False), Engine("drafted", diary, True)]
    plain, drafted = decode_in_turns(
        processes, [JOB, JOB], lambda number, finished: progress.append((number, finished))
    )

    assert [name for name, _ in diary] == ["plain", "drafted"] * 12
    of_one = [asked for name, asked in diary if name == "plain"]
    assert [r.in_flight for r in of_one] == [1] * 4 + [4] * 4 + [8] * 4
    assert [r.max_tokens for r in of_one] == [2, 4, 4, 4] * 3
    assert [len(r.prompts) for r in of_one] == [4] * 4 + [12] * 4 + [24] * 4

    # The median of the three that are not for warming up, and the last one's answers.
    assert plain[0] == LevelResult(1, [2.0, 3.0, 4.0], [[[4]]], {})
    assert plain[0].seconds == 3.0
    assert [result.seconds for result in drafted] == [3.0, 7.0, 11.0]
    assert drafted[0].stats == {"sampled_tokens": 18, "verifications": 6}
    for number in (0, 1):
        finished = [n for which, n in progress if which == number]
        assert finished == list(range(1, JOB.decodings + 1))


def test_a_machine_that_is_slow_for_a_while_is_so_for_both_engines() -> None:
    plain = LevelResult(1, [2.0, 8.0, 2.0], [[[4], [5]]], {})
    drafted = LevelResult(1, [1.0, 4.0, 4.0], [[[4, 5]]], {})
    assert drafted.speed_up(plain) == 2.0
    shorter = LevelResult(1, [1.0, 4.0, 4.0], [[[4]]], {})
    assert shorter.speed_up(plain) == 1.0
