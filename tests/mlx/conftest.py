# SPDX-License-Identifier: Apache-2.0
"""A target that knows some answers by heart and its drafter, as mlx-lm loads them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

mx = pytest.importorskip("mlx.core")


class Pair(NamedTuple):
    """What `mlx_lm.load` gives of the target, in float32, and the drafter's folder."""

    model: Any
    tokenizer: Any
    drafter: str

    def prompt(self, question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)


@pytest.fixture(scope="package")
def pair_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from redrafter_testing.models.reciting_target import make_reciting_pair

    return make_reciting_pair(tmp_path_factory.mktemp("reciting"))


@pytest.fixture
def load_pair(pair_folders: tuple[Path, Path]) -> Callable[[], Pair]:
    import mlx_lm

    target, drafter = pair_folders
    return lambda: Pair(*mlx_lm.load(str(target)), str(drafter))


@pytest.fixture(scope="package")
def pair(pair_folders: tuple[Path, Path]) -> Pair:
    import mlx_lm

    target, drafter = pair_folders
    return Pair(*mlx_lm.load(str(target)), str(drafter))
