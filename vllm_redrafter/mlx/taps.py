"""What a drafter reads of a target: what enters its layers, and what comes out of the last norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vllm_redrafter.mlx.derived_class import derive


class Seen:
    """One pass.

    Attributes:
        inputs: by layer, counted from 0, what entered it: [1, N, H].
        output: of the module that has the layers: [1, N, H].
        replacement: what that module returns instead; None for its own.
        ends_at: a layer in front of which the pass ends; None for a whole one.
    """

    def __init__(self, replacement: mx.array | None = None, ends_at: int | None = None) -> None:
        self.inputs: dict[int, mx.array] = {}
        self.output: Any = None
        self.replacement = replacement
        self.ends_at = ends_at


class _Ended(Exception):
    """The pass was not to go on."""


class Taps:
    """Of one model, shared by all who read it; outside `watch` nothing is kept."""

    def __init__(self) -> None:
        self.seen: Seen | None = None

    @contextmanager
    def watch(
        self, replacement: mx.array | None = None, ends_at: int | None = None
    ) -> Iterator[Seen]:
        """See one pass through the model; the arguments are those of `Seen`."""
        seen = self.seen = Seen(replacement, ends_at)
        try:
            yield seen
        except _Ended:
            pass
        finally:
            self.seen = None


def tapped(model: nn.Module, layers: Sequence[int]) -> Taps | None:
    """The taps of a model, at these of its layers and at the module that has them.

    Only the classes of these modules change, to ones derived from their own.

    Args:
        model: of mlx-lm.
        layers: counted from 0.

    Returns:
        None where no module has the layers that `model.layers` names.
    """
    inner = _with_layers(model)
    if inner is None:
        return None
    if derive(inner, _TappedModel):
        inner.taps = Taps()
    for index in layers:
        layer = model.layers[index]
        if derive(layer, _TappedLayer):
            layer.taps, layer.index = inner.taps, index
    return inner.taps


def _with_layers(model: nn.Module) -> nn.Module | None:
    """The module whose list of layers `model.layers` is; not the model itself."""
    layers = list(map(id, model.layers))
    for module in model.modules():
        for value in module.values():
            if module is not model and isinstance(value, list) and list(map(id, value)) == layers:
                return module
    return None


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
            seen.inputs[self.index] = next(iter((*args, *kwargs.values())))
            if seen.ends_at == self.index:
                raise _Ended
        return super().__call__(*args, **kwargs)
