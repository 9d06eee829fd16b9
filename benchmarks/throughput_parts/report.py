"""From measurements to the table: medians, ratios to plain decoding, shares of wall time.

Machines are shared and their speed drifts, so a method is compared with the plain decoding of the
same repeat, and the ratio is the median of these comparisons. The adaptive method is compared in
the same way with the best fixed shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from throughput_parts.engine import Run
from throughput_parts.methods import Method, MethodName
from vllm_redrafter.data.repetition import NGRAM, repeated_share

PARTS = ("draft", "verify", "attention", "accept", "compact")
"""Where a ReDrafter step's time goes; `verify` is the target's forward pass less attention."""


@dataclass(frozen=True)
class Measurement:
    """A run of one method in one repeat, without its text.

    Attributes:
        method, shape: see `Method`.
        repeat: counted from 0.
        concurrency, temperature: see `Run`.
        seconds: of wall time.
        requests: prompts answered.
        output_tokens: of all requests.
        steps: engine steps that output tokens.
        request_steps: requests that output tokens, summed over steps.
        repeated_ngrams: share of the output's 8-grams that are repetitions, see `repeated_share`.
        identical: requests whose output equals plain decoding's in the same repeat; None for
            plain decoding itself and for sampled output.
        spec_decode, parts: see `Run`.
    """

    method: MethodName
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
    parts: dict[str, float] | None

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def in_flight(self) -> float:
        """Requests in flight on average: below `concurrency`, as the last ones end one by one."""
        return self.request_steps / self.steps

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
        """Tree nodes verified per request, in the steps that verified some; None if none did.

        ReDrafter alone counts them.
        """
        if self.parts is None or not self.parts["verifications"]:
            return None
        return self.parts["drafted_tokens"] / self.parts["verifications"]

    @property
    def undrafted(self) -> float | None:
        """Share of the decoding steps in which nothing was drafted, as it would not have paid.

        None where the engine has no such choice.
        """
        if self.parts is None or "undrafted_steps" not in self.parts:
            return None
        undrafted = self.parts["undrafted_steps"]
        steps = self.parts["steps"] + undrafted
        return undrafted / steps if steps else None

    @property
    def shares(self) -> dict[str, float] | None:
        """PARTS as shares of the wall time; None where the worker does not measure them.

        The rest is vLLM's: scheduling, preparing batches, messages between processes, text.
        """
        if self.parts is None:
            return None
        seconds = {**self.parts, "verify": self.parts["forward"] - self.parts["attention"]}
        return {part: seconds[part] / self.seconds for part in PARTS}


def measurements(
    method: Method, repeat: int, runs: Sequence[Run], plain: Sequence[Run]
) -> list[Measurement]:
    """One per run; `plain` are the runs of plain decoding in the same repeat."""
    baseline = {(run.concurrency, run.temperature): run.generation.outputs for run in plain}
    found = []
    for run in runs:
        outputs = run.generation.outputs
        compared = None
        if method.name != "plain" and run.temperature == 0:
            expected = baseline[run.concurrency, run.temperature]
            compared = sum(a == b for a, b in zip(outputs, expected, strict=True))
        found.append(
            Measurement(
                method=method.name,
                shape=method.shape,
                repeat=repeat,
                concurrency=run.concurrency,
                temperature=run.temperature,
                seconds=run.generation.seconds,
                requests=len(outputs),
                output_tokens=sum(map(len, outputs)),
                steps=run.generation.steps,
                request_steps=run.generation.request_steps,
                repeated_ngrams=repeated_share(outputs),
                identical=compared,
                spec_decode=run.spec_decode,
                parts=run.parts,
            )
        )
    return found


class Spread(NamedTuple):
    """Median and extremes over repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """A line of the table: one method and shape at one temperature and concurrency.

    Attributes:
        in_flight: requests, on average; median over repeats.
        tokens_per_second: over repeats.
        ratio: to plain decoding in the same repeat.
        over_fixed: of an adaptive row, to the fixed shape with the highest median ratio at this
            temperature and concurrency, in the same repeat; None for other rows.
        nodes, undrafted: medians over repeats; see `Measurement`.
        tokens_per_step, shares, repeated_ngrams: medians over repeats; see `Measurement`.
        identical: requests, of all repeats, whose output equals plain decoding's.
        requests: of all repeats.
    """

    temperature: float
    concurrency: int
    method: MethodName
    shape: str
    in_flight: float
    tokens_per_second: Spread
    ratio: Spread
    over_fixed: Spread | None
    tokens_per_step: float | None
    nodes: float | None
    undrafted: float | None
    shares: dict[str, float] | None
    repeated_ngrams: float
    identical: int | None
    requests: int


ORDER: tuple[MethodName, ...] = ("plain", "n-gram", "ReDrafter", "adaptive", "random drafter")


def summarise(measured: Sequence[Measurement]) -> list[Row]:
    """Rows by temperature and concurrency, methods in the order in which they were planned."""
    groups: dict[tuple[float, int, MethodName, str], list[Measurement]] = {}
    for m in measured:
        groups.setdefault((m.temperature, m.concurrency, m.method, m.shape), []).append(m)
    rows = []
    # A stable sort: shapes stay in the order of the plan.
    for key in sorted(groups, key=lambda key: (key[0], key[1], ORDER.index(key[2]))):
        temperature, concurrency, method, _ = key
        group = groups[key]
        plain = groups[temperature, concurrency, "plain", ""]
        fixed = [
            found
            for at, found in groups.items()
            if at[:3] == (temperature, concurrency, "ReDrafter")
        ]
        identical = [m.identical for m in group if m.identical is not None]
        rows.append(
            Row(
                *key,
                in_flight=median(m.in_flight for m in group),
                tokens_per_second=Spread.of([m.tokens_per_second for m in group]),
                ratio=_ratio(group, plain),
                over_fixed=_over_best(group, fixed, plain) if method == "adaptive" else None,
                tokens_per_step=_median_of([m.tokens_per_step for m in group]),
                nodes=_median_of([m.nodes for m in group]),
                undrafted=_median_of([m.undrafted for m in group]),
                shares=_median_shares(group),
                repeated_ngrams=median(m.repeated_ngrams for m in group),
                identical=sum(identical) if identical else None,
                requests=sum(m.requests for m in group),
            )
        )
    return rows


def _ratio(group: Sequence[Measurement], base: Sequence[Measurement]) -> Spread:
    """Tokens per second as a multiple of another method's, each within its repeat."""
    speed = {m.repeat: m.tokens_per_second for m in base}
    return Spread.of([m.tokens_per_second / speed[m.repeat] for m in group])


def _over_best(
    group: Sequence[Measurement],
    fixed: Sequence[Sequence[Measurement]],
    plain: Sequence[Measurement],
) -> Spread | None:
    """The ratio to the fixed shape that is the best over all repeats; None without any."""
    if not fixed:
        return None
    return _ratio(group, max(fixed, key=lambda shape: _ratio(shape, plain).median))


def _median_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _median_shares(group: Sequence[Measurement]) -> dict[str, float] | None:
    known = [m.shares for m in group if m.shares is not None]
    return {part: median(s[part] for s in known) for part in PARTS} if known else None


FIGURES = ("tok/s", "× plain", "× fixed", "tok/step", "nodes", "undrafted", "repeated")


def table(rows: Sequence[Row], settings: Mapping[str, object]) -> Table:
    """The rows for a terminal; a line between concurrency levels."""
    drawn = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
        title=f"{settings['model']}, {settings['dtype']}, up to {settings['max_tokens']} tokens",
        caption=CAPTION,
        caption_justify="left",
    )
    for name in ("T", "requests"):
        drawn.add_column(name, justify="right", no_wrap=True)
    drawn.add_column("method", no_wrap=True)
    for name in (*FIGURES, *PARTS, "same"):
        drawn.add_column(name, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        at = (row.temperature, row.concurrency)
        if previous not in (None, at):
            drawn.add_section()
        previous = at
        shares = row.shares or {}
        drawn.add_row(
            f"{row.temperature:g}",
            f"{row.concurrency} ({row.in_flight:.1f})",
            f"{row.method} {row.shape}".strip(),
            _spread(row.tokens_per_second, ".0f"),
            "1" if row.method == "plain" else _spread(row.ratio, ".2f"),
            "–" if row.over_fixed is None else _spread(row.over_fixed, ".2f"),
            _known(row.tokens_per_step, ".2f"),
            _known(row.nodes, ".1f"),
            _known(row.undrafted, ".0%"),
            f"{row.repeated_ngrams:.0%}",
            *(f"{shares[part]:.0%}" if part in shares else "–" for part in PARTS),
            same_as_plain(row),
        )
    return drawn


CAPTION = (
    "requests: in flight (on average, as the last ones end one by one). "
    "tok/s, × plain: median over repeats (lowest–highest); × plain within a repeat. "
    "× fixed: over the fixed shape that is the best over all repeats, within a repeat. "
    "tok/step: per request and decoding step. "
    "nodes: verified per request, where any were; undrafted: decoding steps without a draft. "
    f"repeated: share of the output's {NGRAM}-grams that occurred before in the same output; text "
    "that repeats itself is easy to draft. "
    "draft … compact: share of the wall time, the rest is vLLM's; verify is the target's forward "
    "pass without attention, which is that of branching trees: chains (1xL) go through vLLM's own, "
    "within verify. "
    "same: greedy outputs identical to plain decoding's."
)


def print_table(rows: Sequence[Row], settings: Mapping[str, object], console: Console) -> None:
    """Print all of it: in a narrow terminal lines are broken rather than figures left out."""
    drawn = table(rows, settings)
    whole = drawn.__rich_measure__(console, console.options.update(max_width=1000)).maximum
    console.width = max(console.width, whole)
    console.print(drawn)


def _known(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _spread(values: Spread, form: str) -> str:
    if values.low == values.high:
        return f"{values.median:{form}}"
    return f"{values.median:{form}} ({values.low:{form}}–{values.high:{form}})"


def same_as_plain(row: Row) -> str:
    """Are the outputs those of plain decoding? How many are, where not all."""
    if row.identical is None:
        return "–"
    return "yes" if row.identical == row.requests else f"no ({row.identical}/{row.requests})"
