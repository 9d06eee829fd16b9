"""What trainings of a few steps need."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from redrafter_testing.models.small_trainings import VOCAB_SIZE
from redrafter_testing.models.tiny_models import add_tokenizer, make_target
from redrafter_testing.models.training_data import write_data


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from a second one, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """accelerate remembers the first training of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB_SIZE)
    add_tokenizer(folder, vocab_size=VOCAB_SIZE)
    return folder


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder, target, num=24, max_tokens=20)
    return folder
