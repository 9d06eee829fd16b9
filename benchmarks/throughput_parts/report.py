# SPDX-License-Identifier: Apache-2.0
"""From runs to rows: totals of all tasks, medians, ratios to plain decoding.

Machines are shared and their speed drifts, so a method is compared with the plain decoding of the
same repeat, and the ratio is the median of these comparisons.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import NamedTuple, Self, TypeAlias

from throughput_parts.engine import Case, Generation, Run
from throughput_parts.methods import Method

NGRAM = 8
SUMMED = "seconds", "steps", "request_steps"


def repeated_share(texts: Sequence[Sequence[int]]) -> float:
    """The share of 8-grams of tokens that occurred before in the same text; 0 if all are shorter.

    Text that repeats itself is easy to draft.
    """
    total = distinct = 0
    for tokens in texts:
        grams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
        total += len(grams)
        distinct += len(set(grams))
    return (total - distinct) / total if total else 0.0


@dataclass(frozen=True)
class Measurement:
    """A run of one method in one repeat, without its text.

    Attributes:
        method, shape: see `Method`.
        repeat: counted from 0.
        concurrency, temperature, task: see `Case`.
        seconds: of wall time.
        requests: prompts answered.
        output_tokens: of all requests.
        steps: engine steps that output tokens.
        request_steps: requests that output tokens, summed over steps.
        repeated_ngrams: share of the output's 8-grams that are repetitions, see `repeated_share`.
        identical: requests whose output equals plain decoding's in the same repeat; None for
            plain decoding itself and for sampled output.
        spec_decode: see `Run`.
    """

    method: str
    shape: str
    repeat: int
    concurrency: int
    temperature: float
    seconds: float
    requests: int
    output_tokens: int
    steps: int
    request_steps: int
    repeated_ngrams: float
    identical: int | None
    spec_decode: dict[str, int]
    task: str | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens per request and decoding step, by one rule for all methods.

        The first token of a request comes out of reading its prompt, so that step does not count.
        None where no request got any further.
        """
        decoding_steps = self.request_steps - self.requests
        return (self.output_tokens - self.requests) / decoding_steps if decoding_steps else None

    @property
    def nodes(self) -> float | None:
        """Draft tokens verified per request, in the steps that verified some; None if none did."""
        drafts = self.spec_decode.get("drafts", 0)
        return self.spec_decode["draft_tokens"] / drafts if drafts else None

    @property
    def undrafted(self) -> float | None:
        """Share of the requests' decoding steps that verified no draft; None without speculation.

        A request's last verification may be one that nobody waited for.
        """
        steps = self.request_steps - self.requests
        if not self.spec_decode or not steps:
            return None
        return max(0.0, 1 - self.spec_decode["drafts"] / steps)


def with_totals(runs: Sequence[Run]) -> list[Run]:
    """The runs, and for each concurrency and temperature with several tasks one of all of them.

    The totals come last, their task None: outputs one after the other, everything else summed.
    """
    found: dict[Case, list[Run]] = {}
    for run in runs:
        if run.case.task is not None:
            found.setdefault(replace(run.case, task=None), []).append(run)
    return [*runs, *(_total(case, tasks) for case, tasks in found.items() if len(tasks) > 1)]


def _total(case: Case, runs: Sequence[Run]) -> Run:
    made = [run.generation for run in runs]
    counted: Counter[str] = Counter()
    for run in runs:
        counted.update(run.spec_decode)
    outputs = [output for generation in made for output in generation.outputs]
    sums = {of: sum(getattr(generation, of) for generation in made) for of in SUMMED}
    return Run(case, Generation(outputs=outputs, **sums), dict(counted))


def measurements(
    method: Method, repeat: int, runs: Sequence[Run], plain: Sequence[Run]
) -> list[Measurement]:
    """One per run; `plain` are the runs of plain decoding in the same repeat."""
    baseline = {run.case: run.generation.outputs for run in plain}
    found = []
    for run in runs:
        outputs, compared = run.generation.outputs, None
        if method.name != "plain" and run.case.temperature == 0:
            compared = sum(a == b for a, b in zip(outputs, baseline[run.case], strict=True))
        found.append(
            Measurement(
                *(method.name, method.shape, repeat),
                **asdict(run.case),
                **{of: getattr(run.generation, of) for of in SUMMED},
                requests=len(outputs),
                output_tokens=sum(map(len, outputs)),
                repeated_ngrams=repeated_share(outputs),
                identical=compared,
                spec_decode=run.spec_decode,
            )
        )
    return found


class Spread(NamedTuple):
    """Median and extremes over repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """A line of the table: one method and shape at one temperature and concurrency, and its task.

    Attributes:
        task: None for all prompts together.
        tokens_per_second: over repeats.
        ratio: to plain decoding in the same repeat.
        tokens_per_step, nodes, undrafted, repeated_ngrams: medians over repeats; see
            `Measurement`.
        identical: requests, of all repeats, whose output equals plain decoding's.
        requests: of all repeats.
    """

    temperature: float
    concurrency: int
    task: str | None
    method: str
    shape: str
    tokens_per_second: Spread
    ratio: Spread
    tokens_per_step: float | None
    nodes: float | None
    undrafted: float | None
    repeated_ngrams: float
    identical: int | None
    requests: int


Key: TypeAlias = tuple[float, int, str | None, str, str]
"""What a row is of: temperature, concurrency, task, method and shape."""


def summarise(measured: Sequence[Measurement]) -> list[Row]:
    """Rows by temperature, concurrency and task, methods in the order in which they were planned.

    Tasks stand in the order in which they were measured, and after them all of them together.
    """
    groups: dict[Key, list[Measurement]] = {}
    for m in measured:
        key = (m.temperature, m.concurrency, m.task, m.method, m.shape)
        groups.setdefault(key, []).append(m)
    tasks = dict.fromkeys(m.task for m in measured if m.task is not None)
    place = {task: number for number, task in enumerate([*tasks, None])}
    # A stable sort: methods stay in the order of the plan.
    keys = sorted(groups, key=lambda key: (*key[:2], place[key[2]]))
    return [_row(key, groups[key], groups[(*key[:3], "plain", "")]) for key in keys]


def _row(key: Key, group: Sequence[Measurement], plain: Sequence[Measurement]) -> Row:
    speed = {m.repeat: m.tokens_per_second for m in plain}
    identical = [m.identical for m in group if m.identical is not None]
    return Row(
        *key,
        tokens_per_second=Spread.of([m.tokens_per_second for m in group]),
        ratio=Spread.of([m.tokens_per_second / speed[m.repeat] for m in group]),
        tokens_per_step=_median_of([m.tokens_per_step for m in group]),
        nodes=_median_of([m.nodes for m in group]),
        undrafted=_median_of([m.undrafted for m in group]),
        repeated_ngrams=median(m.repeated_ngrams for m in group),
        identical=sum(identical) if identical else None,
        requests=sum(m.requests for m in group),
    )


def _median_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
