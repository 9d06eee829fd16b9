# SPDX-License-Identifier: Apache-2.0
"""Modules of a model changed in place: taps for hidden states, ropes for positions."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class _Seen:
    """Hidden states of one pass.

    Attributes:
        inputs: by layer, counted from 0, what entered it: [1, N, H].
        runs_again: a layer was entered twice.
        output: of the module that has the layers: [1, N, H].
        replacement: what that module returns instead; None for its own.
        ends_at: a layer in front of which the pass ends; None for a whole one.
    """

    def __init__(self, replacement: mx.array | None = None, ends_at: int | None = None) -> None:
        self.inputs: dict[int, mx.array] = {}
        self.runs_again = False
        self.output: Any = None
        self.replacement = replacement
        self.ends_at = ends_at

    def enter(self, layer: int, x: mx.array) -> None:
        self.runs_again |= layer in self.inputs
        self.inputs[layer] = x
        if layer == self.ends_at:
            raise _Ended


class _Ended(Exception):
    """Ends a pass early."""


class Taps:
    """Of one model, shared by all its readers; outside `watch` nothing is kept."""

    def __init__(self) -> None:
        self.seen: _Seen | None = None

    @contextmanager
    def watch(
        self, replacement: mx.array | None = None, ends_at: int | None = None
    ) -> Iterator[_Seen]:
        """See one pass through the model; the arguments are attributes of what is yielded."""
        seen = self.seen = _Seen(replacement, ends_at)
        try:
            yield seen
        except _Ended:
            pass
        finally:
            self.seen = None


def tapped(model: nn.Module, layers: Sequence[int]) -> Taps | None:
    """The taps of a model, at these layers and at the module that has them.

    None where no module in it has all of `model.layers`.
    """
    inner = _with_layers(model)
    if inner is None:
        return None
    if _derive(inner, _TappedModel):
        inner.taps = Taps()
    for index in layers:
        layer = model.layers[index]
        if _derive(layer, _TappedLayer):
            layer.taps, layer.index = inner.taps, index
    return inner.taps


def _with_layers(model: nn.Module) -> nn.Module | None:
    """The smallest module that has all the layers in it; not the model itself."""
    layers = set(map(id, model.layers))
    above = [
        module
        for module in model.modules()
        if module is not model
        and id(module) not in layers
        and layers <= set(map(id, module.modules()))
    ]
    return min(above, key=lambda module: len(module.modules()), default=None)


class _TappedModel(nn.Module):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(*args, **kwargs)
        seen = self.taps.seen
        if seen is None:
            return output
        seen.output = output
        return output if seen.replacement is None else seen.replacement


class _TappedLayer(nn.Module):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        seen = self.taps.seen
        if seen is not None:
            seen.enter(self.index, next(iter((*args, *kwargs.values()))))
        return super().__call__(*args, **kwargs)


def take_positions(model: nn.Module) -> None:
    """Let every rope of a model take the positions [N] of its tokens as `offset`.

    MLX's rope counts on from one offset for each row of a batch. Nodes of a tree are tokens of one
    row, so they are made rows of a batch while the rope turns them.
    """
    for module in model.modules():
        parameters = inspect.signature(type(module).__call__).parameters
        if "offset" in parameters and not module.children():
            _derive(module, _PositionedRope)


class _PositionedRope(nn.Module):
    def __call__(
        self, x: mx.array, offset: int | mx.array = 0, *args: Any, **kwargs: Any
    ) -> mx.array:
        if not isinstance(offset, mx.array) or offset.size == 1 or x.shape[0] > 1:
            return super().__call__(x, offset, *args, **kwargs)
        rows = x.swapaxes(0, -2)  # [1, heads, N, size] to [N, heads, 1, size]
        return super().__call__(rows, offset, *args, **kwargs).swapaxes(0, -2)


def _derive(module: nn.Module, mixin: type) -> bool:
    """Give a module, in place and once, a class derived from a mixin and its own; was it new?

    Wrapping it would move its parameters in the model's tree, and hide its attributes.
    """
    if isinstance(module, mixin):
        return False
    its_class: Any = type(module)
    module.__class__ = _derived(mixin, its_class)
    return True


@cache
def _derived(mixin: Any, its_class: Any) -> Any:
    return type(its_class.__name__, (mixin, its_class), {"__module__": its_class.__module__})
