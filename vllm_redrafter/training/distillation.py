# SPDX-License-Identifier: Apache-2.0
"""The distillation loss: the drafter learns to say what the target will say, L tokens ahead.

Alignment. The target reads x_0 .. x_t and its hidden state h_t predicts x_{t+1}, the root. From
there the drafter goes on by itself, and every position t of a text is such a start:

    s_1 = start(c_t, e(x_{t+1}))         logits(c_t, s_1, 0) predict x_{t+2}
    s_2 = advance(s_1, e(x_{t+2}), 1)    logits(c_t, s_2, 1) predict x_{t+3}
    s_j                                  logits(c_t, s_j, j-1) predict x_{t+1+j},  j = 1 .. L

with c_t = condition(h_t).

The teacher of step j at position t is the target's own distribution of x_{t+1+j}, which it gives
at position t+j. The target wrote the text itself, so the tokens that teacher forcing feeds to the
drafter are those that will be accepted in use.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.replay.batches import TextBatch
from vllm_redrafter.replay.target import TargetOutputs
from vllm_redrafter.training.chunked_loss import head_loss
from vllm_redrafter.training.teachers import MixedTeacher
from vllm_redrafter.utils.errors import ConfigError


class _Predictions(NamedTuple):
    """All that the drafter predicts in a batch: N rows, ordered by the position of their teacher.

    Attributes:
        features: [N, E], what the last layer reads.
        start: [N] int64, the flat position t among the batch's B * T that the row starts from.
        step: [N] int64, j from 1; the teacher is at position start + j, the label one further.
    """

    features: Tensor
    start: Tensor
    step: Tensor


def _counted_starts(generated: Tensor, num_steps: int) -> Iterator[Tensor]:
    """For j = 1 .. L: [B, T-1-j] bool, which starts t count, whose label is x_{t+1+j}.

    It is those whose root, path and label were all written by the target. Rows packed into one
    block stay apart: a row begins with a token of its prompt.
    """
    counted = generated[:, 1:]
    for step in range(1, num_steps + 1):
        counted = counted[:, :-1] & generated[:, step + 1 :]
        yield counted


def count_rows(generated: Tensor, num_steps: int) -> Tensor:
    """[L] int64: how many rows each step has."""
    return torch.stack([counted.sum() for counted in _counted_starts(generated, num_steps)])


def _predictions(
    drafter: DraftHead,
    batch: TextBatch,
    target: TargetOutputs,
    num_steps: int,
    of_selector: bool = False,
) -> _Predictions:
    """Unroll the drafter L steps from every position, and keep the rows that count.

    With `of_selector` features are those that the selector ranks by, from step 2 on. ConfigError
    where blocks are too short.
    """
    generated = batch.generated
    length = generated.shape[1]
    if length < num_steps + 2:
        raise ConfigError(
            f"distillation: {num_steps} steps need blocks of at least {num_steps + 2} tokens, "
            f"got {length}; use longer blocks or a smaller beam length"
        )
    first = torch.arange(generated.shape[0], device=generated.device).unsqueeze(1) * length
    # The target may be of lower precision.
    dtype = drafter.dtype
    condition = drafter.condition(target.hidden.to(dtype))

    def embedded(depth: int) -> Any:
        return drafter.embedding_of(lambda _: target.embedded.to(dtype), depth)(batch.tokens)

    counts = list(_counted_starts(generated, num_steps))
    features_of = _selector_features if of_selector else _unrolled_features
    features = list(features_of(drafter, condition, embedded, counts))
    starts, steps = [], []
    for step, counted in enumerate(counts, start=1):
        start = first + torch.arange(length - 1 - step, device=generated.device)
        starts.append(start[counted])
        steps.append(torch.full_like(starts[-1], step))
    first_step = 1 if of_selector else 0
    start_of, step_of = torch.cat(starts[first_step:]), torch.cat(steps[first_step:])
    order = (start_of + step_of).argsort(stable=True)
    return _Predictions(torch.cat(features[first_step:])[order], start_of[order], step_of[order])


def _unrolled_features(
    drafter: DraftHead,
    condition: Tensor,
    embedded: Callable[[int], Tensor],
    counts: Sequence[Tensor],
) -> Iterator[Tensor]:
    """Features [n, E] of each step's counted starts.

    `embedded` gives what the head reads of all tokens at a depth, [B, T, H].
    Row t of step j's state is s_j of the start at t, which has read x_{t+1} .. x_{t+j}.
    """
    state = drafter.start(condition[:, :-1], embedded(0)[:, 1:])
    for depth, counted in enumerate(counts):
        if depth:
            # A start that would read past the end of the text drops out.
            state = drafter.advance(state[:, :-1], embedded(depth)[:, depth + 1 :], depth)
        of_start = condition[:, : -2 - depth][counted]
        yield drafter.features(of_start, state[:, :-1][counted])


def _selector_features(
    drafter: DraftHead,
    condition: Tensor,
    embedded: Callable[[int], Tensor],
    counts: Sequence[Tensor],
) -> Iterator[Tensor]:
    """Features [n, E] of each step's counted starts, which follow from the root alone."""
    state = drafter.start(condition[:, :-1], embedded(0)[:, 1:])
    features = drafter.base_features(condition[:, :-1], state, len(counts))
    for depth, counted in enumerate(counts):
        yield features[:, : -1 - depth, depth][counted]


class _Loss(NamedTuple):
    """A scalar that backward starts from; and [L], detached, the sum of each step's rows."""

    total: Tensor
    per_step: Tensor


class Distillation(nn.Module):
    """Drafter and loss in one module, because data parallelism wraps one module.

    Args:
        drafter: gradients reach its parameters only.
        head: the target's vocabulary-wide layer; needed where its distribution is taught.
        num_steps: L, the beam length to train for.
        target_share: of the target's distribution in what is taught; the text has the rest.
        train_selector: teach the drafter's selector, from step 2 on.
    """

    def __init__(
        self,
        drafter: DraftHead,
        head: Callable[[Tensor], Tensor] | None,
        num_steps: int,
        target_share: float = 1.0,
        train_selector: bool = False,
    ) -> None:
        super().__init__()
        self.drafter, self.head, self.num_steps = drafter, head, num_steps
        self.target_share, self.train_selector = target_share, train_selector

    def forward(self, batch: TextBatch, target: TargetOutputs, step_weights: Tensor) -> _Loss:
        """The loss of an L-step unroll; `step_weights` [L] are those of a row in the total."""
        drafter = self.drafter
        rows = _predictions(drafter, batch, target, self.num_steps, self.train_selector)
        dtype = torch.promote_types(rows.features.dtype, torch.float32)
        weights = step_weights[rows.step - 1]
        totals, per_step = [], torch.zeros(self.num_steps, dtype=dtype, device=weights.device)
        for layer, chosen in _rows_by_layer(drafter, rows.step, self.num_steps):
            position = (rows.start + rows.step)[chosen]
            teacher = MixedTeacher(
                drafter,
                self.head,
                hidden=target.last.flatten(0, 1),
                labels=batch.tokens.flatten()[position + 1],
                position=position,
                share=self.target_share,
                dtype=dtype,
            )
            given = rows.features[chosen], layer.weight, weights[chosen]
            total, losses = head_loss(*given, teacher)
            totals.append(total)
            per_step.index_add_(0, rows.step[chosen] - 1, losses)
        return _Loss(torch.stack(totals).sum(), per_step)


def _rows_by_layer(
    drafter: DraftHead, step: Tensor, num_steps: int
) -> Iterator[tuple[nn.Linear, Tensor]]:
    """Each vocabulary-wide layer, and the rows [n] int64 of N that it ranks tokens for.

    `step` [N] int64 is that of the rows, from 1.
    """
    depths = defaultdict(list)
    for depth in range(num_steps):
        depths[drafter.layer_of(depth)].append(depth)
    for layer, of_layer in depths.items():
        yield layer, torch.isin(step - 1, step.new_tensor(of_layer)).nonzero().squeeze(1)
