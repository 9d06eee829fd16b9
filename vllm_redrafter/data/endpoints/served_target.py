# SPDX-License-Identifier: Apache-2.0
"""Does a server serve the target? Asked of it before it is asked for data.

Its name, length and tokenizer are compared with the target's files. Its weights are compared with
those of the first server that was asked for this data, by the log-probabilities of a fixed text
(`served.json`).
"""

from __future__ import annotations

import json
from pathlib import Path

from vllm_redrafter.data.endpoints.client import EndpointClient
from vllm_redrafter.data.target import Target
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import write_once
from vllm_redrafter.utils.json_files import read_json

SERVED_FILE = "served.json"
TEXT = (
    "In 1889 the tower stood 312 m high. def area(r): return 3.14159 * r ** 2  # Größe, 塔, été\n"
)
COMPARED_TOKENS = 32
TOLERANCE = 0.1
"""Of the mean difference of log-probabilities, in nats: rounding in bf16 makes far less, other
weights make more."""


class ServedTarget:
    """What a server has to serve.

    Args:
        target: that is to be served.
        length: of the longest conversation in tokens; None for what the target allows.
        served_name: the servers' name for the target; None for its own.
        output: the data's folder, which keeps the first server's log-probabilities.

    Raises:
        ConfigError: the target cannot be read, or its greatest length is unknown.
    """

    def __init__(
        self, target: Target, length: int | None, served_name: str | None, output: Path
    ) -> None:
        self._target, self._served_name, self._file = target.name, served_name, output / SERVED_FILE
        self._tokens = list(map(int, target.tokenizer(TEXT)["input_ids"]))
        length = length or getattr(target.text_config, "max_position_embeddings", None)
        if length is None:
            raise ConfigError(
                f"target {target.name!r}: its config.json does not say how long a text may be; "
                "give --max-model-len"
            )
        self.max_model_len = int(length)

    async def check(self, client: EndpointClient) -> str:
        """The name to ask for the target by.

        Raises:
            EndpointDown: the server does not answer.
            ConfigError: it serves something else.
        """
        name, length = self._find(client.address, await client.models())
        if length < self.max_model_len:
            raise ConfigError(
                f"endpoint {client.address} allows {length} tokens, and {self.max_model_len} may "
                f"be asked for: give --max-model-len, at most {length}"
            )
        found = await client.tokens(name, TEXT)
        if found != self._tokens:
            raise ConfigError(
                f"endpoint {client.address} has another tokenizer than {self._target!r}: the same "
                f"text begins with {found[:8]} there, and with {self._tokens[:8]} here; serve the "
                "same files"
            )
        prompt = self._tokens[: min(COMPARED_TOKENS, self.max_model_len - 1)]
        self._check_weights(client.address, await client.prompt_log_probs(name, prompt))
        return name

    def _find(self, address: str, models: list[tuple[str, str, int]]) -> tuple[str, int]:
        """The target's name and length there."""
        for name, root, length in models:
            names = {name, _last_part(name), _last_part(root)}
            if self._served_name == name or (
                self._served_name is None and _last_part(self._target) in names
            ):
                return name, length
        served = ", ".join(f"{name!r} (from {root})" for name, root, _ in models) or "nothing"
        raise ConfigError(
            f"endpoint {address} serves {served}, not {self._served_name or self._target!r}; if "
            "that is the target by another name, give it as --served-name"
        )

    def _check_weights(self, address: str, log_probs: list[float]) -> None:
        content = {"endpoint": address, "log_probs": log_probs}
        try:
            write_once(self._file, (json.dumps(content, indent=2) + "\n").encode())
        except OSError as error:
            raise ConfigError(f"{self._file} cannot be written: {error.strerror}") from error
        try:
            first = read_json(self._file)
            pairs = zip(first["log_probs"], log_probs, strict=True)
            distance = sum(abs(a - b) for a, b in pairs) / len(log_probs)
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise ConfigError(f"{self._file}: not what generate-data writes: {error}") from error
        if not distance <= TOLERANCE:
            raise ConfigError(
                f"endpoint {address} has other weights than {first['endpoint']}, the first that "
                "was asked for this folder: the log-probabilities of a fixed text differ by "
                f"{distance:.2f} nats on average ({self._file}); serve the same files in the same "
                "dtype"
            )


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]
