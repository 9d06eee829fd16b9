# SPDX-License-Identifier: Apache-2.0
"""What does not fit a launch of a step is refused by its name: tensors of another dtype, device,
stride or size, and numbers out of range."""

from collections.abc import Callable, Iterator
from functools import partial
from inspect import isfunction, signature
from typing import Any

import pytest
import torch
from torch import Tensor

from redrafter_testing.gpu import kernel_launches
from redrafter_testing.gpu.kernel_launches import DRAFTS, Attention, step_cases
from vllm_redrafter.triton_kernels.build_tree import ScoredTrees
from vllm_redrafter.triton_kernels.find_matches import MatchBuffers
from vllm_redrafter.triton_kernels.join_matches import JoinedBuffers
from vllm_redrafter.triton_kernels.stage_trees import StagedTrees

LAUNCHES = [Attention(window=True, sinks=True), *DRAFTS, *(launch for _, launch in step_cases())]
LAUNCHERS = {
    name: value
    for name, value in vars(kernel_launches).items()
    if isfunction(value) and (name == "attend" or ".triton_kernels." in value.__module__)
}
OF_LOGITS_ALONE = ("top_candidates", "choose_candidates")
OTHER = {torch.bfloat16: torch.int16, torch.int32: torch.float32, torch.int64: torch.float64}
SPOILT: dict[str, Callable[[Tensor], Tensor]] = {
    "dtype": lambda tensor: tensor.view(OTHER.get(tensor.dtype, torch.int32)),
    "device": lambda tensor: tensor.to("meta"),
    "stride": lambda tensor: tensor.new_empty((*tensor.shape, 2))[..., 0],
}
Given = dict[str, Any]


@pytest.fixture(scope="module")
def steps() -> dict[str, Given]:
    """By launcher: the arguments of a step."""
    found: dict[str, Given] = {}

    def note(name: str, *args: Any, **kwargs: Any) -> None:
        given = signature(LAUNCHERS[name]).bind(*args, **kwargs).arguments
        found[name] = given | given.pop("arguments", {})

    with pytest.MonkeyPatch.context() as patch:
        for name in LAUNCHERS:
            patch.setattr(kernel_launches, name, partial(note, name))
        for launch in LAUNCHES:
            launch()
    return found


def spoilt(given: Any, spoil: Callable[[Tensor], Tensor], name: str) -> Iterator[tuple[str, Any]]:
    """The arguments with each tensor in turn spoilt, and its name."""
    if isinstance(given, Tensor) and given.shape[-1] > 1:
        yield name, spoil(given)
    elif isinstance(given, dict):
        for key, value in given.items():
            yield from ((n, {**given, key: v}) for n, v in spoilt(value, spoil, key))
    elif hasattr(given, "_fields"):
        for key in given._fields:
            own = spoilt(getattr(given, key), spoil, key)
            yield from ((n, given._replace(**{key: v})) for n, v in own)


@pytest.mark.parametrize("kind", SPOILT)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_it_is_refused(launcher: str, kind: str, steps: dict[str, Given]) -> None:
    """By its name, or by another's that is expected to be as it is."""
    refused = [*spoilt(steps[launcher], SPOILT[kind], launcher)]
    assert refused
    if launcher in OF_LOGITS_ALONE and kind == "device":
        return
    for name, given in refused:
        with pytest.raises(ValueError, match=rf"\b{name}\b|expected .*(meta|int16)"):
            LAUNCHERS[launcher](**given)


def narrow(dim: int, size: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.narrow(dim, 0, size)


def one(name: str, change: Callable[[Any], Any]) -> Callable[..., Given]:
    return lambda **given: {name: change(given[name])}


REFUSED: list[tuple[str, Callable[..., Given], str]] = [
    ("draft_layer", one("out", lambda out: out.repeat(17, 1)), "out: 1 to 64 rows"),
    ("draft_layer", one("first", lambda first: first._replace(x=first.x[:3])), "first.x: has 3"),
    ("draft_layer", one("bias", narrow(0, 5)), "bias: expected"),
    ("draft_layer", lambda first, **_: {"out": first.x}, "out: is also first.x"),
    ("gated_cell", lambda embedded, **_: {"out": embedded.x}, "out: is also embedded.x"),
    ("gated_cell", one("embedded", lambda e: e._replace(x=e.x[:, 1:])), "embedded.x: expected"),
    ("gated_cell", one("weight", narrow(0, 8)), "weight: expected"),
    ("scale_normed", one("state", narrow(0, 3)), "state: expected"),
    ("scale_normed", lambda state, **_: {"out": state}, "out: is also state"),
    ("gather_dot", one("x", lambda x: x.repeat(17, 1)), "x: at most 64 beams"),
    ("gather_dot", one("weight", narrow(1, 7)), "weight: expected"),
    ("speculator_cell", one("embedded", lambda e: e._replace(rows=None)), "embedded.rows"),
    (
        "speculator_cell",
        lambda projected, **_: {"above": None, "projected": projected[:3]},
        "above.x: has 3 rows",
    ),
    ("speculator_cell", one("norms", lambda norms: [n[:5] for n in norms]), r"norms\[0\]: "),
    ("speculator_cell", one("out", lambda out: out.repeat(1, 2)), "out: at most 8192 columns"),
    ("top_candidates", one("logits", lambda logits: logits[0]), "logits: expected"),
    ("top_candidates", one("logits", narrow(1, 0)), "logits: 0 tokens"),
    ("top_candidates", one("num", lambda _: 51), "num"),
    ("choose_candidates", one("requests", lambda _: 2), "logits: 5 rows are not"),
    ("choose_candidates", one("count", lambda _: 0), "count"),
    ("rank_candidates", one("tokens", narrow(1, 7)), "tokens"),
    ("rank_candidates", one("num", lambda _: 0), "num"),
    ("grow_beams", one("level", lambda _: 5), "level"),
    ("grow_beams", one("top", lambda top: top._replace(logits=top.logits[:3])), "logits: "),
    ("grow_beams", one("survival", lambda s: (s[0], s[1][:, :1], s[2])), "biases: expected"),
    ("grow_beams", one("survival", lambda s: (*s[:2], s[2][:0])), "temperatures: expected"),
    ("find_matches", one("text", lambda text: text.repeat(1, 2)), "out: was made"),
    ("find_matches", one("num_tokens", narrow(0, 1)), "num_tokens"),
    ("find_matches", one("entries", lambda entries: entries.repeat(2)), "entries: 4 requests"),
    ("join_matches", one("probabilities", narrow(1, 5)), "probabilities"),
    ("join_matches", one("paths", lambda _: MatchBuffers(1, 2, 8, 8, "cpu")), "search: 2 req"),
    ("join_matches", one("out", lambda out: JoinedBuffers(2, (4, 5), (1, 8), "cpu")), "out: exp"),
    ("join_matches", one("search", lambda s: s._replace(tokens=s.tokens.float())), "tokens: exp"),
    ("observe_nodes", one("entries", lambda entries: entries.repeat(2)), "entries: 4 requests"),
    ("observe_matches", one("entries", lambda entries: entries.repeat(2)), "entries: 4 requests"),
    (
        "observe_matches",
        lambda counts, probabilities, **_: {
            "counts": counts.repeat(1, 1, 2, 1),
            "probabilities": probabilities.repeat(1, 1, 2),
        },
        "probabilities: of 16 depths",
    ),
    ("admit_nodes", one("scheduled", narrow(1, 1)), "scheduled: expected"),
    ("build_tree", one("tokens", lambda tokens: tokens.repeat(1, 2, 1)), "tokens: 4096 candidates"),
    ("build_tree", one("log_odds", narrow(1, 3)), "log_odds: expected"),
    ("build_tree", one("entries", narrow(0, 1)), r"entries: expected .* \[2\] or more"),
    ("build_tree", one("node_limits", lambda n: n._replace(limits=n.limits[:1])), "limits: "),
    ("build_tree", one("drafts", narrow(1, 126)), "drafts: expected"),
    ("build_tree", lambda **_: {"out": ScoredTrees(2, 127, "meta")}, "out: expected"),
    ("stage_trees", one("cu_num_logits", narrow(0, 1)), "cu_num_logits: expected"),
    ("stage_trees", one("num_padded", lambda _: 5), r"out: expected .* \[5\] or more"),
    ("stage_trees", one("num_padded", lambda _: 1), "num_padded: 1 is too few"),
    ("stage_trees", lambda **_: {"out": StagedTrees(4, 3, "cpu")}, "out: trees of 4 nodes cannot"),
    ("add_depths", one("positions", lambda positions: positions[0]), "positions: expected two dim"),
    ("add_depths", one("cu_num_logits", lambda sums: sums.repeat(2)), "staged: expected"),
    ("load_drafts", one("out", lambda out: out._replace(slots=out.slots[:1])), "slots: expected"),
    ("attend", one("query", Tensor.double), "query: dtype"),
    ("attend", one("query", lambda query: query[0]), "query: expected"),
    ("attend", one("key_cache", lambda cache: cache.to(torch.float8_e5m2)), "key_cache: dtype"),
    ("attend", one("key_cache", lambda cache: cache.repeat(1, 1, 3, 1)), "key_cache: 6 KV heads"),
    ("attend", one("value_cache", narrow(0, 1)), "value_cache: expected"),
    ("attend", one("value_cache", narrow(2, 1)), "value_cache: expected"),
    ("attend", one("out", narrow(0, 1)), "out: expected"),
    ("attend", one("sinks", narrow(0, 1)), "sinks: expected"),
    ("attend", one("block_table", narrow(0, 0)), ".* block_table must have"),
    ("attend", one("block_table", narrow(1, 1)), "block_table: .* which need"),
    ("attend", one("context_lens", narrow(0, 0)), "query_start_loc and .* context_lens"),
    ("attend", one("query_start_loc", narrow(0, 1)), "query_start_loc and"),
    ("attend", one("ancestors", narrow(0, 0)), "ancestors: .* has no room"),
    ("attend", one("ancestors", narrow(1, 4)), "ancestors: .* has no room"),
    ("attend", one("depths", narrow(0, 0)), "depths: .* has no room"),
    ("attend", one("depths", narrow(1, 4)), "depths: .* has no room"),
    ("attend", one("depths", lambda _: None), "depths is needed"),
    ("attend", one("max_nodes", lambda _: 0), "max_nodes must be 1"),
    ("attend", one("max_nodes", lambda _: 129), "max_nodes must be 1"),
    ("attend", one("max_context_len", lambda n: 2 * n), "block_table: .* which need"),
]


@pytest.mark.parametrize(("launcher", "change", "named"), REFUSED)
def test_what_does_not_fit_is_named(
    launcher: str, change: Callable[..., Given], named: str, steps: dict[str, Given]
) -> None:
    given = steps[launcher]
    with pytest.raises(ValueError, match=rf"^{named}"):
        LAUNCHERS[launcher](**given | change(**given))
