# SPDX-License-Identifier: Apache-2.0
"""A family of targets: a small random one of it, and what is asked of it."""

import random
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams

from redrafter_testing.models.tiny_models import make_drafter, make_random_target
from redrafter_testing.requests.answers import single_tokens_of

VOCAB, HIDDEN = 24, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
"""In transformers' names; few tokens, so that a random drafter is often right."""


@dataclass(frozen=True)
class Questions:
    """So many requests of tokens, every other one sampled with a seed."""

    count: int
    tokens: int

    def run(self, llm: Any) -> list[list[int]]:
        """The answers' tokens."""
        asked = [self.prompt(i) for i in range(self.count)]
        return single_tokens_of(llm.generate(asked, self.params(), use_tqdm=False))

    def prompt(self, i: int) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompts()[i]}

    def prompts(self) -> list[list[int]]:
        rng = random.Random(0)
        return [[rng.randrange(2, VOCAB) for _ in range(4 + 9 * i)] for i in range(self.count)]

    def params(self) -> list[SamplingParams]:
        return [
            SamplingParams(
                temperature=0.8 * (i % 2),
                seed=i,
                max_tokens=self.tokens - 2 * i,
                ignore_eos=True,
                detokenize=False,
            )
            for i in range(self.count)
        ]


@dataclass(frozen=True)
class Family:
    """Targets of one class in vLLM, with a row in docs/compatibility.md; the drafter's sizes.

    `questions` and `blank` (nothing to see or hear) take a number and the most tokens of an answer.
    A prefix LM's images see their own tokens, which vLLM's CPU attention ignores.
    """

    architecture: str
    make: Callable[[Path], Path]
    feature: str = ""
    vocab_size: int = VOCAB
    hidden_size: int = HIDDEN
    engines: tuple[str, ...] = ("cpu", "v2")
    questions: Callable[[int, int], Any] = Questions
    blank: Callable[[int, int], Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    batched_tokens: int = 64
    is_prefix_lm: bool = False

    @property
    def name(self) -> str:
        """Of its tests."""
        return f"{self.architecture}: {self.feature}" if self.feature else self.architecture

    def make_pair(self, folder: Path) -> tuple[Path, Path]:
        """A target, and a drafter of its sizes."""
        sizes = self.vocab_size, self.hidden_size
        return self.make(folder / "target"), make_drafter(folder / "drafter", *sizes)


TABLE = tomllib.loads(Path(__file__).with_name("families.toml").read_text())


def families(kind: str) -> tuple[Family, ...]:
    """Those of families.toml under this name."""
    return tuple(random_family(**entry) for entry in TABLE[kind])


def random_family(
    architecture: str,
    config: str,
    feature: str = "",
    sizes: Mapping[str, Any] | None = None,
    without: Sequence[str] = (),
    is_bare: bool = False,
    engines: Sequence[str] = ("cpu", "v2"),
) -> Family:
    """A target of random weights with this configuration of transformers'.

    It has SIZES, but for some, or none of them where it `is_bare`; and sizes of its own.
    """
    common = {} if is_bare else {n: size for n, size in SIZES.items() if n not in without}
    made = getattr(transformers, config)(**common | dict(sizes or {}))
    hidden = made.get_text_config().hidden_size
    make = partial(make_random_target, made)
    return Family(architecture, make, feature, hidden_size=hidden, engines=tuple(engines))


def rename_weights(folder: Path, new: str, old: str) -> None:
    """Give a target's weights the names, which vLLM reads, that transformers 4 wrote."""
    file = folder / "model.safetensors"
    tensors = {name.replace(new, old): t.contiguous() for name, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def word_tokenizer(names: Sequence[str], added: Sequence[str] = (), **rest: Any) -> Any:
    """Of words between spaces; the first two names begin and end a text."""
    vocabulary = {name: i for i, name in enumerate(names)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=names[0]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_tokens(list(added))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token=names[0], eos_token=names[1], pad_token=names[1], **rest
    )
