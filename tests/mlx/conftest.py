# SPDX-License-Identifier: Apache-2.0
"""A target that knows some answers by heart and its drafter: as mlx-lm loads them, and served."""

import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoTokenizer

from redrafter_testing.engines.server import started

if find_spec("mlx") is None:  # a machine without MLX
    collect_ignore_glob = ["*.py"]


class Pair(NamedTuple):
    """What `mlx_lm.load` gives of the target, in float32, and the drafter's folder."""

    model: Any
    tokenizer: Any
    drafter: str

    def prompt(self, question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)

    def answer(self, drafter: Any, prompt: str | list[int], most: int, **options: Any) -> list[Any]:
        """Responses of `stream_generate`, which is mlx-lm's own without a drafter."""
        from vllm_redrafter.mlx import stream_generate

        tokens = self.prompt(prompt) if isinstance(prompt, str) else prompt
        return [*stream_generate(self.model, self.tokenizer, tokens, most, drafter, **options)]


@pytest.fixture(scope="package")
def load_pair(reciting_pair: tuple[Path, Path]) -> Callable[[], Pair]:
    import mlx_lm

    target, drafter = reciting_pair
    return lambda: Pair(*mlx_lm.load(str(target)), str(drafter))


@pytest.fixture(scope="package")
def pair(load_pair: Callable[[], Pair]) -> Pair:
    return load_pair()


VOCAB_SIZE = 512
"""Of the target."""
FAILS = 77
"""The `max_tokens` that make the server's generation fail, as a panic of the tokenizer would."""
SERVE = f"""
import sys
from vllm_redrafter.mlx import serve

generate = serve.generate

def failing(**arguments):
    if arguments["max_tokens"] == {FAILS}:
        raise BaseException("fails on purpose")
    return generate(**arguments)

serve.generate = failing
# The budget would go by the clock, and may draft nothing on a busy machine.
serve.serve(*sys.argv[1:3], sys.argv[3:], {{"adaptive": False}})
"""


class Servers(NamedTuple):
    """Addresses of our server and of mlx-lm's, of the same target, and the log of the first."""

    ours: str
    plain: str
    log: Path


@pytest.fixture(scope="package")
def servers(
    reciting_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    """Of a target whose tokenizer has more tokens than it has itself."""
    folder = tmp_path_factory.mktemp("served")
    environment = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(folder / "none")}
    target, drafter, log = folder / "target", str(reciting_pair[1]), folder / "ours.log"
    shutil.copytree(reciting_pair[0], target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_tokens([f"<|{number}|>" for number in range(VOCAB_SIZE)])
    tokenizer.save_pretrained(target)
    ours = ["-c", SERVE, str(target), drafter]
    theirs = ["-m", "mlx_lm", "server", "--model", str(target)]
    with (
        log.open("w") as output,
        started(ours, environment, stdout=output, stderr=output) as our_address,
        started(theirs, environment) as their_address,
    ):
        yield Servers(our_address, their_address, log)
