"""What a drafter proposes at every place of a text, and which of it the target wrote.

A step begins wherever the one before it ended, which depends on how much that one verified. So
the searches are recorded at every place of the text, and any way of choosing what to verify can
be replayed on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_redrafter.data.rows import TextRows
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.training.estimate import answers, batches
from vllm_redrafter.training.target import read_target
from vllm_redrafter.tree.beam_search import ExploredNodes, beam_search
from vllm_redrafter.utils.errors import ConfigError

PLACES_AT_ONCE = 256
"""A search holds logits of W beams for each of them."""


@dataclass(frozen=True)
class Searches:
    """The searches of one beam width at T places of the text.

    Attributes:
        log_probs: [T, L, W] float32, cumulative, of the drafter; -inf where there is no node.
        back_pointers: [T, L, W] int64, the parents' beams.
        accepted: [T, L, W] bool, the nodes whose path is what the text goes on with.
    """

    log_probs: Tensor
    back_pointers: Tensor
    accepted: Tensor

    def at(self, places: Tensor, beam_length: int) -> Searches:
        """Those at some places [N] int64, cut to a shorter search."""
        parts = (self.log_probs, self.back_pointers, self.accepted)
        return Searches(*(part[places, :beam_length] for part in parts))


@dataclass(frozen=True)
class Traces:
    """A text's searches.

    Attributes:
        by_width: the searches of each beam width, all at the same T places.
        left: [T] int64, how many tokens of the answer follow the place's; an answer's places stand
            together, and its last has one token left.
    """

    by_width: Mapping[int, Searches]
    left: Tensor


def record(
    drafter: DraftHead,
    target: Any,
    rows: TextRows,
    beam_widths: Iterable[int],
    beam_length: int,
    batch_size: int = 16,
) -> Traces:
    """Search at every token of the target's answers but their last ones.

    Args:
        drafter: the draft head.
        target: the transformers model that wrote the text.
        rows: the text; each run of generated tokens is one answer.
        beam_widths: of the searches.
        beam_length: of all of them; a shorter search is the beginning of a longer one.
        batch_size: rows read by the target at once.

    Raises:
        ConfigError: no answer has two tokens.
    """
    widths = sorted(set(beam_widths))
    found: dict[int, list[Searches]] = {width: [] for width in widths}
    left: list[Tensor] = []
    embed = target.get_input_embeddings()
    for batch in batches(rows, batch_size, embed.weight.device):
        hidden = read_target(target, batch, drafter.config.target_layers).hidden
        row, root, last = _places(batch.generated)
        left.append((last - root).cpu())
        for part in torch.split(torch.arange(row.shape[0]), PLACES_AT_ONCE):
            for width in widths:
                at = row[part], root[part], last[part]
                searched = _search(drafter, embed, hidden, batch.tokens, *at, width, beam_length)
                found[width].append(searched)
    if not any(part.numel() for part in left):
        raise ConfigError("replay: the text has no answer of two tokens or more")
    return Traces({width: _joined(parts) for width, parts in found.items()}, torch.cat(left))


def _places(generated: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every token of every answer but its last: block, position, and the answer's last position."""
    row, first, last = answers(generated)
    count = last - first
    answer = torch.arange(row.shape[0], device=row.device).repeat_interleave(count)
    begin = (count.cumsum(0) - count)[answer]
    root = first[answer] + torch.arange(answer.shape[0], device=row.device) - begin
    return row[answer], root, last[answer]


def _search(
    drafter: DraftHead,
    embed: Callable[[Tensor], Tensor],
    hidden: Tensor,
    tokens: Tensor,
    row: Tensor,
    root: Tensor,
    last: Tensor,
    beam_width: int,
    beam_length: int,
) -> Searches:
    """Search from the roots at tokens[row, root], whose answers end at tokens[row, last]."""
    explored = beam_search(
        drafter, embed, hidden[row, root - 1], tokens[row, root], beam_width, beam_length
    )
    following = root.unsqueeze(1) + 1 + torch.arange(beam_length, device=root.device)
    written = tokens[row.unsqueeze(1), following.clamp(max=tokens.shape[1] - 1)]
    written = written.masked_fill(following > last.unsqueeze(1), -1)
    accepted = _accepted(explored, written)
    return Searches(explored.log_probs.cpu(), explored.back_pointers.cpu(), accepted.cpu())


def _accepted(explored: ExploredNodes, written: Tensor) -> Tensor:
    """[T, L, W] bool: the nodes on the path of the tokens `written` [T, L]; -1 matches none."""
    matches = (explored.tokens == written.unsqueeze(2)) & (explored.log_probs > -torch.inf)
    levels = [matches[:, 0]]
    for level in range(1, matches.shape[1]):
        above = levels[-1].gather(1, explored.back_pointers[:, level])
        levels.append(matches[:, level] & above)
    return torch.stack(levels, dim=1)


def _joined(parts: list[Searches]) -> Searches:
    return Searches(
        torch.cat([part.log_probs for part in parts]),
        torch.cat([part.back_pointers for part in parts]),
        torch.cat([part.accepted for part in parts]),
    )
