# SPDX-License-Identifier: Apache-2.0
"""A tensor of another dtype, device or stride is refused by its name, in any launch of a step."""

from collections.abc import Callable, Iterator
from functools import partial
from inspect import isfunction, signature
from typing import Any

import pytest
import torch
from torch import Tensor

from redrafter_testing.gpu import kernel_launches
from redrafter_testing.gpu.kernel_launches import DRAFTS, Attention, step_cases

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
