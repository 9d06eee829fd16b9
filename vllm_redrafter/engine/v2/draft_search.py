"""Beam search over the draft head in few launches, for a GPU: `beam_search`, on kernels.

At few requests a draft's time is its launches: some 90 of torch's for 4 beams of 5 tokens, of
which a search needs seven per level. The state, the input projection and each residual block are
one launch each (`draft_layers.py`), the vocabulary-wide layer is torch's product, and its best
tokens and the beams that they make are three (`top_candidates.py`, `grow_beams.py`).

Above `MAX_ROWS` beams the small layers are `Drafter`'s own: there, products weigh more than
launches. A vocabulary that ranks of tensor parallelism share is ranked as `beam_search` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from vllm_redrafter.beam_search import ExploredNodes, log_softmax_of_top
from vllm_redrafter.drafter import Drafter, ResidualBlock
from vllm_redrafter.policy import SearchShape
from vllm_redrafter.sharding import VocabularyShard
from vllm_redrafter.triton_kernels.draft_layers import MAX_ROWS, Product, draft_layer
from vllm_redrafter.triton_kernels.grow_beams import BeamBuffers, grow_beams
from vllm_redrafter.triton_kernels.top_candidates import TopTokens, top_candidates


class Survival(Protocol):
    """What the odds and the survival of nodes are predicted by: see `AcceptanceEstimator`."""

    slope: Tensor
    biases: Tensor


class DraftSearch:
    """Searches of one shape, for up to so many requests; buffers are allocated once.

    Attributes:
        beams: what the last search found.
    """

    def __init__(
        self,
        drafter: Drafter,
        embed: Callable[[Tensor], Tensor],
        table: nn.Module | None,
        shape: SearchShape,
        max_requests: int,
        shard: VocabularyShard | None = None,
        survival: Survival | None = None,
    ) -> None:
        """Read the weights where the drafter has them at each search.

        Args:
            drafter: on the device.
            embed: the target's input embedding, tokens [...] int64 -> [..., H].
            table: the layer that `embed` looks rows of `weight` up in and does nothing else; None
                where it does more.
            shape: of the searches.
            max_requests: the most that one search is for.
            shard: the part of the draft vocabulary that the drafter has; None for all of it.
            survival: ranks nodes by their survival; None ranks them by log-probability.
        """
        self._drafter, self._embed, self._shard = drafter, embed, shard
        self._table = table
        weight = drafter.last_layer.weight
        width, length = shape
        self.beams = BeamBuffers(max_requests, length, width, weight.device)
        self._survival = None
        if survival is not None:
            self._survival = survival.slope, survival.biases[:length]
        config = drafter.config
        self._to_target = drafter.d2t if config.draft_vocab_size is not None else None
        rows = min(MAX_ROWS, max_requests * width)
        # A layer reads one of the two and writes the other.
        self._states = weight.new_empty(2, rows, config.hidden_size)
        self._features = weight.new_empty(2, rows, config.exit_dim)
        self._no_normaliser = weight.new_zeros(max_requests * width, dtype=torch.float32)

    @torch.inference_mode()
    def explore(self, hidden: Tensor, root_tokens: Tensor) -> tuple[ExploredNodes, Tensor | None]:
        """Search the L tokens that follow the root, for all requests at once.

        Args:
            hidden: [R, H], the target's hidden state that predicted the root token.
            root_tokens: [R] int64, the last sampled token.

        Returns:
            The explored nodes, in memory that the next search writes over; with `survival`, the
            log of their survival is in the place of the log-probabilities, and their log-odds
            [R, L, W] come second; else None.
        """
        requests = root_tokens.shape[0]
        _, length, width = self.beams.tokens.shape
        condition = self._drafter.condition(hidden)
        state: Tensor | None = None
        tokens = root_tokens
        for level in range(length):
            state = self._step(state, tokens, level)
            logits = self._drafter.last_layer(self._features_of(condition, state))
            grow_beams(
                self._top(logits, width),
                level,
                requests,
                self.beams,
                to_target=self._to_target,
                survival=self._survival,
            )
            tokens = self.beams.last_tokens[: requests * width]
        found, ranked = self.beams, self._survival is not None
        scores = found.log_survival if ranked else found.log_probs
        explored = ExploredNodes(
            found.tokens[:requests], found.back_pointers[:requests], scores[:requests]
        )
        return explored, found.odds[:requests] if ranked else None

    def _step(self, state: Tensor | None, tokens: Tensor, level: int) -> Tensor:
        """The states [rows, H] after `tokens`, each of which continues one of the level above."""
        drafter, rows = self._drafter, tokens.shape[0]
        parents = self.beams.parents[:rows]
        if rows > MAX_ROWS or not drafter.config.rnn:
            before = None if state is None else state.index_select(0, parents)
            return drafter.step(before, self._embed(tokens))
        weight = drafter.rnn_w.weight
        if self._table is not None:
            embedded = Product(self._table.weight, weight, tokens)
        else:
            embedded = Product(self._embed(tokens), weight)
        recurrent = drafter.rnn_u
        return draft_layer(
            embedded,
            self._states[level % 2, :rows],
            second=None if state is None else Product(state, recurrent.weight, parents),
            bias=recurrent.bias,
            silu=True,
        )

    def _features_of(self, condition: Tensor, state: Tensor) -> Tensor:
        """`Drafter.features`: condition [R, exit_dim], state [R * beams, H] -> [.., exit_dim]."""
        drafter, rows = self._drafter, state.shape[0]
        config = drafter.config
        by_request = state.view(condition.shape[0], -1, config.hidden_size)
        if rows > MAX_ROWS:
            return drafter.features(condition.unsqueeze(1), by_request).flatten(0, 1)
        if config.has_input_projection:
            weight = drafter.input_proj.weight[:, config.hidden_size :]
            x = draft_layer(Product(state, weight), self._features[0, :rows], addend=condition)
        else:
            every = condition.unsqueeze(1).expand(-1, by_request.shape[1], -1)
            x = torch.cat([every, by_request], dim=-1).flatten(0, 1)
        for index in range(config.num_draft_layers):
            block = drafter.lm_head[index]
            assert isinstance(block, ResidualBlock)
            linear = block.linear
            out = self._features[(index + 1) % 2, :rows]
            x = draft_layer(Product(x, linear.weight), out, bias=linear.bias, silu=True, residual=x)
        return x

    def _top(self, logits: Tensor, width: int) -> TopTokens:
        if self._shard is None:
            return top_candidates(logits, width)
        log_probs, tokens = log_softmax_of_top(logits, width, self._shard)
        return TopTokens(
            log_probs.contiguous(), tokens.int().contiguous(), self._no_normaliser[: len(logits)]
        )
