"""Does a server serve the target? Asked of the server, and compared with the target's folder.

Its name, the tokens of its vocabulary, its chat template and its length are compared with the
folder's. Its weights cannot be, without loading them: they are compared with those of the first
server that was asked for this folder, by what both think of a fixed text (`served.json`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from vllm_redrafter.data.conversation_rows import Conversation
from vllm_redrafter.data.endpoints.client import EndpointClient, ServedModel
from vllm_redrafter.data.generation_settings import GenerationSettings
from vllm_redrafter.data.target_files import load_from
from vllm_redrafter.data.turns import PromptRenderer
from vllm_redrafter.data.vocabulary import EmbeddedTokens
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import write_once
from vllm_redrafter.utils.json_files import read_json

SERVED_FILE = "served.json"
TEXT = (
    "In 1889 the tower stood 312 m high. def area(r): return 3.14159 * r ** 2  # Größe, 塔, été\n"
)
CHAT = Conversation(("How high is the tower?", "And in feet?"), source="the check of a server")
CHAT_ANSWERS = ("312 m.",)
IN_NO_VOCABULARY = 2**31 - 1
FINGERPRINT_TOKENS = 32
FINGERPRINT_TOLERANCE = 0.1
"""Of the mean difference of log-probabilities, in nats: what batches and parallelism of other sizes
make of the same weights in bf16 is far less, and what other weights make of it more."""


@dataclass(frozen=True)
class Fingerprint:
    """What a server thinks of a fixed text.

    Attributes:
        endpoint: its address.
        prompt: token ids.
        log_probs: of all of them but the first.
    """

    endpoint: str
    prompt: list[int]
    log_probs: list[float]

    def distance(self, other: Fingerprint) -> float:
        """The mean difference, in nats; infinite where the texts differ."""
        if self.prompt != other.prompt or len(self.log_probs) != len(other.log_probs):
            return float("inf")
        pairs = list(zip(self.log_probs, other.log_probs, strict=True))
        return sum(abs(a - b) for a, b in pairs) / len(pairs)


class ServedTarget:
    """What a server has to serve.

    Args:
        target: a folder, or a hub id.
        settings: for the length, the system prompt and the log-probabilities.
        served_name: how the servers call the target; None for its own name.
        output: the data's folder, which keeps the fingerprint.

    Raises:
        ConfigError: the target cannot be read, or nobody says how long its texts may be.
    """

    def __init__(
        self, target: str, settings: GenerationSettings, served_name: str | None, output: Path
    ) -> None:
        self.target = target
        self._served_name, self._output = served_name, output
        self._tokenizer = load_from(AutoTokenizer, target)
        config = load_from(AutoConfig, target).get_text_config()
        self._vocab_size = int(config.vocab_size)
        embedded = EmbeddedTokens(self._tokenizer, self._vocab_size)
        self._renderer = PromptRenderer(self._tokenizer, embedded, settings.system_prompt)
        self._given_length = settings.sampling.max_model_len
        length = self._given_length or getattr(config, "max_position_embeddings", None)
        if length is None:
            raise ConfigError(
                f"target {target!r}: its config.json does not say how long a text may be; give "
                "--max-model-len"
            )
        self.max_model_len = int(length)

    async def check(self, client: EndpointClient) -> str:
        """The name to ask for the target by.

        Raises:
            EndpointDown: the server does not answer.
            ConfigError: it serves something else.
        """
        model = self._find(client.address, await client.models())
        self._check_length(client.address, model)
        text_tokens = [int(token) for token in self._tokenizer(TEXT)["input_ids"]]
        await self._check_tokens(client, model.name, {"prompt": TEXT}, text_tokens, "tokenizer")
        if self._renderer.has_template:
            messages = self._renderer.messages(CHAT, CHAT_ANSWERS)
            expected = self._renderer.prompt(CHAT, CHAT_ANSWERS)
            question = {"messages": messages, "add_generation_prompt": True}
            await self._check_tokens(client, model.name, question, expected, "chat template")
        prompt = text_tokens[: min(FINGERPRINT_TOKENS, self.max_model_len - 1)]
        await self._check_vocabulary(client, model.name, prompt)
        log_probs = await client.prompt_log_probs(model.name, prompt)
        self._check_fingerprint(Fingerprint(client.address, prompt, log_probs))
        return model.name

    def _find(self, address: str, models: Sequence[ServedModel]) -> ServedModel:
        for model in models:
            names = {model.name, _last_part(model.name), _last_part(model.root)}
            if self._served_name == model.name or (
                self._served_name is None and _last_part(self.target) in names
            ):
                return model
        served = ", ".join(f"{model.name!r} (from {model.root})" for model in models) or "nothing"
        wanted = self._served_name or self.target
        raise ConfigError(
            f"endpoint {address} serves {served}, not {wanted!r}; if that is the target by another "
            "name, give it as --served-name"
        )

    def _check_length(self, address: str, model: ServedModel) -> None:
        found, wanted = model.max_model_len, self.max_model_len
        if found < wanted or (self._given_length is None and found != wanted):
            whose = "--max-model-len" if self._given_length else "the target's config.json"
            raise ConfigError(
                f"endpoint {address} allows {found} tokens, and {whose} says {wanted}: give "
                f"--max-model-len, at most {found}"
            )

    async def _check_tokens(
        self,
        client: EndpointClient,
        model: str,
        question: dict[str, Any],
        expected: Sequence[int],
        what: str,
    ) -> None:
        found = await client.tokens(model, question)
        if found != list(expected):
            raise ConfigError(
                f"endpoint {client.address} has another {what} than {self.target!r}: the same text "
                f"is {len(found)} tokens there ({_some(found)}), and {len(expected)} here "
                f"({_some(expected)}); serve the same files"
            )

    async def _check_vocabulary(
        self, client: EndpointClient, model: str, prompt: Sequence[int]
    ) -> None:
        size = self._vocab_size
        refusal = await client.refusal_of_token(model, prompt, size - 1)
        if refusal is not None:
            found = f"fewer tokens than the {size} of {self.target!r} ({refusal})"
        elif (
            await client.refusal_of_token(model, prompt, size) is None
            # Or does it not look at such numbers at all? Older versions do not.
            and await client.refusal_of_token(model, prompt, IN_NO_VOCABULARY) is not None
        ):
            found = f"more tokens than the {size} of {self.target!r}"
        else:
            return
        raise ConfigError(
            f"endpoint {client.address} serves a model with {found}: serve the same files"
        )

    def _check_fingerprint(self, found: Fingerprint) -> None:
        path = self._output / SERVED_FILE
        try:
            write_once(path, (json.dumps(asdict(found), indent=2) + "\n").encode())
        except OSError as error:
            raise ConfigError(f"--output {path}: cannot be written to: {error}") from error
        try:
            first = Fingerprint(**read_json(path))
            distance = first.distance(found)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{path}: not what generate-data writes: {error}") from error
        if not distance <= FINGERPRINT_TOLERANCE:
            raise ConfigError(
                f"endpoint {found.endpoint} has other weights than {first.endpoint}, the first "
                f"that was asked for this folder: the log-probabilities of a fixed text differ by "
                f"{distance:.2f} nats on average ({path}); serve the same files in the same dtype"
            )


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]


def _some(tokens: Sequence[int]) -> str:
    shown = ", ".join(map(str, tokens[:8]))
    return f"{shown}, …" if len(tokens) > 8 else shown
