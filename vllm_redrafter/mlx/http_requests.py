# SPDX-License-Identifier: Apache-2.0
"""Checks of HTTP requests beyond mlx-lm's, so that no request ends the server.

MLX checks no index: a token id beyond the vocabulary reads or writes beyond an array.
"""

import inspect
import json
import logging
import reprlib
import sys
from typing import Any

from mlx_lm import server
from transformers import PreTrainedTokenizerBase

from vllm_redrafter.utils.errors import ConfigError, one_line

SERVERS_OWN = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
SERVERS_OWN -= {"self", "documents", "kwargs"}
"""Not allowed in `chat_template_kwargs`: other templates, which may never end, or lengths."""


class Handler(server.APIHandler):
    """Refuses more than mlx-lm's handler does; null fields count as unset."""

    @property
    def body(self) -> Any:
        return self._body

    @body.setter
    def body(self, sent: Any) -> None:
        self._body = sent
        if isinstance(sent, dict):
            self._body = {name: value for name, value in sent.items() if value is not None}

    def do_POST(self) -> None:
        """As mlx-lm's; a failure ends this request alone, and its client gets the message."""
        try:
            super().do_POST()
        except ConnectionError as error:
            logging.info("The client has left: %s", error)
        except Exception as error:
            is_read = hasattr(self, "request_id")
            logging.error("A request failed: %s", one_line(error))
            message = json.dumps({"error": one_line(error) or type(error).__name__}).encode()
            if is_read and self.stream:  # its headers were sent before the first token
                self.wfile.write(b"data: " + message + b"\n\n")
                return
            self._headers_buffer: list[bytes] = []  # mlx-lm's 200, not sent yet
            self._set_completion_headers(500 if is_read else 400)
            self.end_headers()
            self.wfile.write(message)

    def _set_completion_headers(self, status_code: int = 200) -> None:
        """As mlx-lm's, which answers 404 to any error before the first token."""
        is_refused = status_code == 404 and isinstance(sys.exception(), ConfigError)
        super()._set_completion_headers(400 if is_refused else status_code)

    def _validate(self, name: str, expected_type: Any, *limits: Any, **more: Any) -> None:
        """As mlx-lm's, which refuses 0 for some fields of floats."""
        kinds = (float, int) if expected_type is float else expected_type
        super()._validate(name, kinds, *limits, **more)

    def validate_model_parameters(self) -> None:
        super().validate_model_parameters()
        if owned := SERVERS_OWN.intersection(self.chat_template_kwargs or ()):
            raise ConfigError(f"chat_template_kwargs: {sorted(owned)} are the server's: leave out")
        if self.stream_options is not None:
            self.stream_options.setdefault("include_usage", False)
        if self.body.get("n", 1) != 1:
            raise _refused("n", self.body["n"], "be 1: ask once for each answer")
        if "num_draft_tokens" in self.body:
            raise ConfigError(
                f"num_draft_tokens ({self.body['num_draft_tokens']!r}) in a request is refused: "
                "the server has its own limit (--spec-tokens), and chooses below it: leave it out"
            )

    def handle_chat_completions(self) -> server.CompletionRequest:
        """As mlx-lm's, which would fetch images first."""
        if any(server._image_parts(self.body.get("messages", []))):
            raise ConfigError(
                "messages: images are refused, as mlx-serve reads text alone: use mlx_lm.server"
            )
        return super().handle_chat_completions()


class Generator(server.ResponseGenerator):
    """mlx-lm's, in whose thread a failure ends its own request alone."""

    def _serve_single(self, request: Any, stream: Any) -> None:
        answers, _, arguments = request
        try:
            self._check_tokens("logit_bias", arguments.logits.logit_bias or ())
            self._check_tokens("top_k", [arguments.sampling.top_k])
            super()._serve_single(request, stream)
        except BaseException as error:  # a panic of the tokenizer's Rust is no Exception
            logging.exception("A request failed")
            known = isinstance(error, ConfigError)
            answers.put(error if known else RuntimeError(f"the request failed: {one_line(error)}"))

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """As mlx-lm's; no prompt that is empty or has tokens the target does not know."""
        name = "prompt" if request.request_type == "text" else "messages"
        try:
            tokenized = super()._tokenize(tokenizer, request, args)
        except Exception as error:
            why = f"{type(error).__name__}: {one_line(error)}"
            raise ConfigError(f"{name} cannot be made a prompt of: {why}") from error
        if not tokenized[0]:
            raise ConfigError(f"{name}: the prompt is empty, and must have a token at least")
        self._check_tokens(name, tokenized[0])
        return tokenized

    def _check_tokens(self, name: str, tokens: Any) -> None:
        size = self.model_provider.draft_model.target.vocab_size
        for token in tokens:
            if not 0 <= token < size:
                raise _refused(name, token, f"be from 0 to {size - 1}, the target's vocabulary")


def _refused(name: str, value: object, limit: str) -> ConfigError:
    return ConfigError(f"{name} must {limit}: {reprlib.repr(value)} is refused")
