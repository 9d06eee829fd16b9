# SPDX-License-Identifier: Apache-2.0
"""mlx-lm's own HTTP server, with our generation in the place of its draft model's.

Chat templates, stop words, tools, streaming and the prompt cache stay mlx-lm's. Its server has no
place to put another generation, so `serve` replaces four names in it while it runs.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Any

import huggingface_hub
from huggingface_hub import CacheNotFound, HFCacheInfo
from mlx_lm import server
from mlx_lm.generate import GenerationResponse

from vllm_redrafter.checkpoints.drafter_files import read_config
from vllm_redrafter.checkpoints.reading import Checkpoint, is_redrafter, verifier_of
from vllm_redrafter.data.chat_template import of_texts
from vllm_redrafter.mlx.drafter import load_drafter
from vllm_redrafter.mlx.generation import stream_generate
from vllm_redrafter.mlx.http_requests import Generator, Handler
from vllm_redrafter.mlx.prompt_cache import CachedText, PromptCache
from vllm_redrafter.mlx.unread_rope import check_rope
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import check_no_pattern
from vllm_redrafter.utils.patching import patched

NOT_SAID = 0
"""mlx-lm's `num_draft_tokens`, where nobody says any."""


def serve(
    target: str, drafter: str | None, arguments: Sequence[str], speculation: Mapping[str, Any]
) -> None:
    """Serve a target until Ctrl-C.

    Args:
        target: a folder or a hub id; or a drafter that records its target.
        drafter: of the target; None for none, or if `target` is one. Without a drafter, what the
            text repeats is verified.
        arguments: more of mlx-lm's server.
        speculation: keyword arguments of `load_drafter`; those left out have its defaults.

    Raises:
        ConfigError: something cannot be loaded or served, with the reason.
    """
    target, drafter = target_and_drafter(target, drafter)
    if drafter is not None:
        Checkpoint.open(drafter).checked()  # before the target is loaded
    command = ["mlx-serve", "--model", target, "--num-draft-tokens", str(NOT_SAID), *arguments]
    replaced = {
        "ModelProvider": partial(Provider, drafter=drafter, speculation=speculation),
        "run": run,
        "stream_generate": generate,
        "scan_cache_dir": scan_cache_dir,
    }
    with ExitStack() as stack:
        # mlx_lm/server.py makes its parser inside `main`, and calls these by name. They can be
        # handed over as arguments as soon as its `main` takes them.
        stack.enter_context(patched(sys, "argv", command))
        for name, replacement in replaced.items():
            stack.enter_context(patched(server, name, replacement))
        server.main()


def target_and_drafter(model: str, drafter: str | None) -> tuple[str, str | None]:
    """What is served, by name: the target, and its drafter or None.

    Raises:
        ConfigError: `model` is not within reach; or it is a drafter, and records no target or has
            another one beside it.
    """
    values = read_config(model, what="target")
    if not is_redrafter(values):
        return model, drafter
    remedy = f"name the target: mlx-serve TARGET --drafter {model}"
    if drafter is not None:
        raise ConfigError(
            f"{model!r} is a drafter itself, and --drafter names another one, {drafter!r}: {remedy}"
        )
    if (target := verifier_of(values)) is None:
        raise ConfigError(f"the drafter {model!r} does not say for which target it is: {remedy}")
    return target, model


class Provider(server.ModelProvider):
    """Loads targets as mlx-lm's server does, each with a drafter of ours.

    Attributes:
        loaded: done when the default model is there; has the exception if that failed.

    Args:
        cli_args: mlx-lm's.
        drafter: of the default model; None for what the text repeats alone.
        speculation: keyword arguments of `load_drafter`.

    Raises:
        ConfigError: an argument that cannot be kept.
    """

    def __init__(
        self, cli_args: argparse.Namespace, *, drafter: str | None, speculation: Mapping[str, Any]
    ) -> None:
        check_arguments(cli_args)
        cli_args.draft_model = drafter
        super().__init__(cli_args)
        if self.is_distributed:
            raise ConfigError(
                "mlx-serve: a drafter runs beside its target in one process, and this is one of "
                "several (mlx.launch): start it without, or use mlx_lm.server without a drafter"
            )
        self._speculation = speculation
        self.loaded: Future[None] = Future()

    def load_default(self) -> None:
        """As mlx-lm's, in the thread that generates; `loaded` tells the one that waits."""
        try:
            super().load_default()
        except BaseException as error:
            self.loaded.set_exception(error)
            # Of this thread, without a traceback: `run` raises the error.
            raise SystemExit from error
        self.loaded.set_result(None)

    def _load(
        self,
        model_path: str,
        adapter_path: str | None = None,
        draft_model_path: str | None = None,
    ) -> None:
        check_no_pattern(model_path)
        super()._load(model_path, adapter_path)
        try:
            self.tokenizer.chat_template = of_texts(self.tokenizer)
            check_rope(model_path, read_config(model_path), getattr(self.model, "args", None))
            self.draft_model = load_drafter(draft_model_path, self.model, **self._speculation)
        except BaseException:
            self.reset()  # else the next request would find a target that decodes plainly
            raise
        self.model_key = (model_path, adapter_path, draft_model_path)
        self.is_batchable = False


def check_arguments(cli_args: argparse.Namespace) -> None:
    """Refuse what cannot be kept of mlx-lm's arguments.

    Raises:
        ConfigError: the message names the argument and the remedy.
    """
    refused = {
        "--draft-model": (cli_args.draft_model is not None, "say --drafter, in front of --"),
        "--num-draft-tokens": (
            cli_args.num_draft_tokens != NOT_SAID,
            "say --spec-tokens, in front of --",
        ),
        "--kv-bits": (
            cli_args.kv_bits is not None,
            "accepted rows are moved in the KV cache, which works in full precision alone: leave "
            "it out",
        ),
        "--pipeline": (cli_args.pipeline, "a drafter runs in one process: leave it out"),
    }
    for name, (is_given, remedy) in refused.items():
        if is_given:
            raise ConfigError(f"mlx-serve: {name} is refused: {remedy}")


def generate(
    *,
    num_draft_tokens: int,
    kv_bits: None,
    kv_group_size: int,
    quantized_kv_start: int,
    input_embeddings: None,
    stream: Any,
    prompt_cache: list[Any],
    **arguments: Any,
) -> Iterator[GenerationResponse]:
    """Our `stream_generate`, called as mlx-lm's server calls its own; logs tokens per step.

    Args:
        num_draft_tokens: NOT_SAID, which `check_arguments` and `Handler` see to.
        kv_bits: None, likewise; then neither `kv_group_size` nor `quantized_kv_start` has a use.
        input_embeddings: None, likewise.
        stream: the thread's own; `stream_generate` has one of each thread as well.
        prompt_cache: a new one, or what `PromptCache` found.
        arguments: what both take alike.
    """
    cached = prompt_cache.tokens if isinstance(prompt_cache, CachedText) else ()
    num_tokens = num_steps = 0
    try:
        for response in stream_generate(prompt_cache=prompt_cache, cached_text=cached, **arguments):
            num_tokens += 1
            num_steps += not response.from_draft
            yield response
    finally:
        logging.info("ReDrafter: %d tokens in %d steps", num_tokens, num_steps)


def scan_cache_dir() -> HFCacheInfo:
    """The hub's cache, for the list of models; empty where nothing was ever downloaded."""
    try:
        return huggingface_hub.scan_cache_dir()
    except CacheNotFound:
        return HFCacheInfo(0, frozenset(), frozenset(), [])


def run(host: str, port: int, model_provider: Provider) -> None:
    """Listen as soon as the default model is loaded.

    mlx-lm's own listens at once; where loading fails, it goes on and answers nothing.

    Raises:
        ConfigError: the target or the drafter cannot be loaded.
    """
    cli_args = model_provider.cli_args
    cache = PromptCache(cli_args.prompt_cache_size)
    if cli_args.prompt_cache_bytes is not None:
        cache.max_bytes = cli_args.prompt_cache_bytes
    generator = Generator(model_provider, cache)
    try:
        model_provider.loaded.result()
    except BaseException:
        generator.stop_and_join()
        raise
    server._run_http_server(host, port, generator, handler_class=Handler)
