"""A small EAGLE head, the anchor of the comparison: one decoder layer over features.

After EAGLE (arXiv 2401.15077). With h_i the target's last hidden state at position i and x_{i+1}
the token that follows, the layer reads all pairs up to i and predicts the next hidden state, which
the target's own vocabulary-wide layer turns into tokens:

    u_i = W [e(x_{i+1}) ; h_i]        f_i = layer(u_0 .. u_i) ~ h_{i+1}        logits = lm_head f_i

It is trained by teacher forcing, with the true h: smooth L1 between f_i and h_{i+1}, and a tenth of
the cross-entropy to the target's distribution. Drafting goes on with its own f in place of h. What
our heads have not: attention to the whole text, so a cache of keys and values in an engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_redrafter.tree.beam_search import ExploredNodes, log_softmax_of_top
from vllm_redrafter.tree.policy import SearchShape

ROTARY_BASE = 10_000.0
TOKENS_WEIGHT = 0.1
"""Of the cross-entropy, as in the paper."""


@dataclass(frozen=True)
class Cache:
    """Keys and values [B, heads, T, H / heads] of a text, or of the nodes on paths."""

    keys: Tensor
    values: Tensor


class EagleHead(nn.Module):
    """The layer; the vocabulary-wide layer is the target's, frozen.

    Args:
        hidden_size: the target's, H.
        num_heads: of attention; divides H into even parts.
        inner_size: of the SwiGLU.
    """

    def __init__(self, hidden_size: int, num_heads: int, inner_size: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.join = nn.Linear(2 * hidden_size, hidden_size)
        self.attention_norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.inner_norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.up = nn.Linear(hidden_size, 2 * inner_size, bias=False)
        self.down = nn.Linear(inner_size, hidden_size, bias=False)

    def inputs(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """u [..., H] of e(x_{i+1}) and h_i, both [..., H]."""
        joined: Tensor = self.join(torch.cat([embedded, hidden], dim=-1))
        return joined

    def project(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Cache]:
        """Queries, keys and values [B, heads, T, H / heads] of inputs [B, T, H]."""
        parts = self.qkv(self.attention_norm(inputs)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(-3))
        return rotate(query, positions), Cache(rotate(key, positions), value)

    def finish(self, inputs: Tensor, attended: Tensor) -> Tensor:
        """f [B, T, H] of the layer's inputs and of what attention gave [B, heads, T, H / heads]."""
        x = inputs + self.out(attended.transpose(1, 2).flatten(-2))
        gate, value = self.up(self.inner_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(F.silu(gate) * value)
        return out

    def forward(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Cache]:
        """Whole texts at once: f and the cache of [B, T] pairs, each reading those before it."""
        inputs = self.inputs(embedded, hidden)
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        query, cache = self.project(inputs, positions)
        attended = F.scaled_dot_product_attention(query, cache.keys, cache.values, is_causal=True)
        return self.finish(inputs, attended), cache


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding of [B, heads, T, d], positions [T] or [B, T]."""
    half = x.shape[-1] // 2
    rates = ROTARY_BASE ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[..., None].float() * rates
    angle = angle.unsqueeze(1) if positions.ndim == 2 else angle
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def eagle_loss(
    head: EagleHead,
    lm_head: Callable[[Tensor], Tensor],
    embedded: Tensor,
    hidden: Tensor,
    generated: Tensor,
) -> Tensor:
    """The loss of teacher-forced texts.

    Args:
        head: in training.
        lm_head: hidden states [N, H] to the logits of the draft vocabulary.
        embedded: [B, T, H], the target's embedding of x_0 .. x_{T-1}.
        hidden: [B, T, H], the target's hidden states.
        generated: [B, T] bool; f_i counts where x_{i+1} and x_{i+2} were generated.
    """
    predicted, _ = head(embedded[:, 1:-1], hidden[:, :-2])
    counted = generated[:, 1:-1] & generated[:, 2:]
    predicted, true = predicted[counted], hidden[:, 1:-1][counted]
    taught = lm_head(true).softmax(dim=-1)
    tokens = F.cross_entropy(lm_head(predicted), taught)
    return F.smooth_l1_loss(predicted, true) + TOKENS_WEIGHT * tokens


class EagleSearch:
    """Beam search with an EAGLE head: the counterpart of `beam_search`, which carries no cache.

    Args:
        head: the trained layer.
        lm_head: hidden states [..., H] to the logits of the draft vocabulary.
        target_tokens: the target's ids of draft tokens.
        embed: the target's input embedding.
        tokens: [B, T] int64, the texts whose decoding is replayed.
        hidden: [B, T, H], the target's hidden states.
        shape: of the searches.
    """

    def __init__(
        self,
        head: EagleHead,
        lm_head: Callable[[Tensor], Tensor],
        target_tokens: Callable[[Tensor], Tensor],
        embed: Callable[[Tensor], Tensor],
        tokens: Tensor,
        hidden: Tensor,
        shape: SearchShape,
    ) -> None:
        self.shape = shape
        self.head, self.lm_head, self.embed = head, lm_head, embed
        self.target_tokens = target_tokens
        # As an engine would: pairs of accepted tokens are read with the target's own states.
        self.features, self.context = head(embed(tokens[:, 1:]), hidden[:, :-1])

    def __call__(self, row: Tensor, root: Tensor) -> ExploredNodes:
        """Search from the roots tokens[row, root], as `beam_search` does.

        Args:
            row: [R] int64.
            root: [R] int64, at least 1.
        """
        width, length = self.shape
        # Pair i holds the token i + 1.
        feature = self.features[row, root - 1].unsqueeze(1)
        scores, tokens = log_softmax_of_top(self.lm_head(feature), width)
        log_probs, tokens = scores.squeeze(1), self.target_tokens(tokens.squeeze(1))
        back_pointers = torch.zeros_like(tokens)
        levels = [(tokens, back_pointers, log_probs)]
        path: Cache | None = None
        feature = feature.expand(-1, width, -1)
        for level in range(1, length):
            feature = _of_parents(feature, back_pointers)
            inputs = self.head.inputs(self.embed(tokens), feature)
            feature, path = self._layer(inputs, row, root, level, path, back_pointers)
            scores, candidates = log_softmax_of_top(self.lm_head(feature), width)
            scores = (scores + log_probs.unsqueeze(-1)).flatten(1)
            log_probs, best = scores.topk(width, dim=1)
            tokens = self.target_tokens(candidates.flatten(1).gather(1, best))
            back_pointers = best // width
            levels.append((tokens, back_pointers, log_probs))
        return ExploredNodes(*[torch.stack(parts, dim=1) for parts in zip(*levels, strict=True)])

    def _layer(
        self,
        inputs: Tensor,
        row: Tensor,
        root: Tensor,
        level: int,
        path: Cache | None,
        back_pointers: Tensor,
    ) -> tuple[Tensor, Cache]:
        """The layer at a level's nodes [R, W, H]: they read the text, their path and themselves."""
        width = inputs.shape[1]
        position = (root - 1 + level).unsqueeze(1).expand(-1, width)
        query, own = self.head.project(inputs, position)
        # [R, heads, W, depth, d]: each node's own path.
        keys, values = own.keys.unsqueeze(3), own.values.unsqueeze(3)
        if path is not None:
            keys = torch.cat([_paths_of_parents(path.keys, back_pointers), keys], dim=3)
            values = torch.cat([_paths_of_parents(path.values, back_pointers), values], dim=3)
        context_keys, context_values = self.context.keys[row], self.context.values[row]
        scale = query.shape[-1] ** -0.5
        before = torch.arange(context_keys.shape[2], device=root.device) < root.unsqueeze(1)
        to_context = (query @ context_keys.transpose(-1, -2)) * scale
        to_context = to_context.masked_fill(~before[:, None, None], -torch.inf)
        to_path = torch.einsum("rhwd,rhwpd->rhwp", query, keys) * scale
        weights = torch.cat([to_context, to_path], dim=-1).softmax(dim=-1)
        on_context, on_path = weights.split([to_context.shape[-1], to_path.shape[-1]], dim=-1)
        attended = on_context @ context_values
        attended = attended + torch.einsum("rhwp,rhwpd->rhwd", on_path, values)
        return self.head.finish(inputs, attended), Cache(keys, values)


def _of_parents(values: Tensor, back_pointers: Tensor) -> Tensor:
    """[R, W, H] of a level's parents."""
    return values.gather(1, back_pointers.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


def _paths_of_parents(values: Tensor, back_pointers: Tensor) -> Tensor:
    """[R, heads, W, depth, d] of a level's parents."""
    index = back_pointers[:, None, :, None, None].expand(-1, values.shape[1], -1, *values.shape[3:])
    return values.gather(2, index)
