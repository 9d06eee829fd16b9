# SPDX-License-Identifier: Apache-2.0
"""mlx-lm's own HTTP server, with our generation in the place of its draft model's.

Chat templates, stop words, tools and streaming stay mlx-lm's. Its server has no place to put
another generation, so `serve` replaces four names in it while it runs.
"""

import argparse
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import huggingface_hub
from huggingface_hub import CacheNotFound, HFCacheInfo
from mlx_lm import server
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import LRUPromptCache, trim_prompt_cache

from vllm_redrafter.checkpoints.drafter_files import read_config
from vllm_redrafter.checkpoints.reading import Checkpoint, verifier_of
from vllm_redrafter.data.chat_template import of_texts
from vllm_redrafter.heads.registry import heads
from vllm_redrafter.mlx.drafter import load_drafter
from vllm_redrafter.mlx.generation import stream_generate
from vllm_redrafter.mlx.http_requests import Generator, Handler
from vllm_redrafter.mlx.target import check_rope
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import check_no_pattern
from vllm_redrafter.utils.patching import patched

UNSET = 0
"""mlx-lm's default of `num_draft_tokens`."""


def serve(
    target: str, drafter: str | None, arguments: Sequence[str], speculation: Mapping[str, Any]
) -> None:
    """Serve a target until Ctrl-C; a ConfigError says what cannot be loaded or served.

    Args:
        target: a folder or a hub id; or a drafter that records its target.
        drafter: of the target; None to verify matches alone, or if `target` is a drafter.
        arguments: more of mlx-lm's server.
        speculation: keyword arguments of `load_drafter`.
    """
    target, drafter = target_and_drafter(target, drafter)
    if drafter is not None:
        Checkpoint.open(drafter).checked()  # before the target is loaded
    command = ["mlx-serve", "--model", target, "--num-draft-tokens", str(UNSET), *arguments]
    replaced = {
        "ModelProvider": partial(_Provider, drafter=drafter, speculation=speculation),
        "run": _run,
        "stream_generate": generate,
        "scan_cache_dir": _scan_cache_dir,
    }
    # mlx_lm/server.py makes its parser inside `main`, and calls these by name.
    with patched(sys, argv=command), patched(server, **replaced):
        server.main()


def target_and_drafter(model: str, drafter: str | None) -> tuple[str, str | None]:
    """The names of the target and of its drafter, if any; `model` may be a drafter."""
    values = read_config(model, what="target")
    if values.get("model_type") not in heads():
        return model, drafter
    remedy = f"name the target: mlx-serve TARGET --drafter {model}"
    if drafter is not None:
        raise ConfigError(
            f"{model!r} is a drafter itself, and --drafter names another one, {drafter!r}: {remedy}"
        )
    if (target := verifier_of(values)) is None:
        raise ConfigError(f"the drafter {model!r} does not say for which target it is: {remedy}")
    return target, model


class _Provider(server.ModelProvider):
    """Loads targets as mlx-lm's server does, each with a drafter of ours.

    `loaded` is done when the default model is there, and has the exception if that failed.
    """

    def __init__(
        self, cli_args: argparse.Namespace, *, drafter: str | None, speculation: Mapping[str, Any]
    ) -> None:
        _check_arguments(cli_args)
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
        """As mlx-lm's, in the thread that generates; another one waits for `loaded`."""
        try:
            super().load_default()
        except BaseException as error:
            self.loaded.set_exception(error)
            # Of this thread, without a traceback: `_run` raises the error.
            raise SystemExit from error
        self.loaded.set_result(None)

    def _load(
        self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None
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


def _check_arguments(cli_args: argparse.Namespace) -> None:
    """Refuse arguments of mlx-lm's that speculation cannot honour."""
    refused = {
        "--draft-model": (cli_args.draft_model is not None, "say --drafter, in front of --"),
        "--num-draft-tokens": (
            cli_args.num_draft_tokens != UNSET,
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


class _CachedText(list[Any]):
    """The layers' caches, as mlx-lm hands them around, and the tokens in them."""

    def __init__(self, caches: list[Any], tokens: list[int]) -> None:
        super().__init__(caches)
        self.tokens = tokens


class PromptCache(LRUPromptCache):
    """mlx-lm's own, whose entries come with their tokens: a draft may repeat them."""

    def fetch_nearest_cache(
        self, model: Any, tokens: list[int]
    ) -> tuple[_CachedText | None, list[int]]:
        """As mlx-lm's; but the last token is always left to be computed, for its logits."""
        cached, rest = super().fetch_nearest_cache(model, tokens)
        if cached is None:
            return None, rest
        if not rest:
            trim_prompt_cache(cached, 1)
            rest = tokens[-1:]
        return _CachedText(cached, tokens[: -len(rest)]), rest


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

    `_check_arguments` and `Handler` refuse other values of the arguments that are not used.
    """
    cached = prompt_cache.tokens if isinstance(prompt_cache, _CachedText) else ()
    num_tokens = num_steps = 0
    try:
        for response in stream_generate(prompt_cache=prompt_cache, cached_text=cached, **arguments):
            num_tokens += 1
            num_steps += not response.from_draft
            yield response
    finally:
        logging.info("ReDrafter: %d tokens in %d steps", num_tokens, num_steps)


def _scan_cache_dir() -> HFCacheInfo:
    """The hub's cache, for the list of models; empty where nothing was ever downloaded."""
    try:
        return huggingface_hub.scan_cache_dir()
    except CacheNotFound:
        return HFCacheInfo(0, frozenset(), frozenset(), [])


def _run(host: str, port: int, model_provider: _Provider) -> None:
    """Listen when the default model is loaded; mlx-lm's own listens even if loading fails."""
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
