# SPDX-License-Identifier: Apache-2.0
"""`stream_generate` with mlx-lm's signature; the draft model is a `Drafter`."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import GenerationResponse, generation_stream, wired_limit
from mlx_lm.sample_utils import LogitsProcessor
from mlx_lm.tokenizer_utils import TokenizerWrapper

from vllm_redrafter.mlx.decoding import Decoder, Token
from vllm_redrafter.mlx.drafter import Drafter
from vllm_redrafter.mlx.sampling import NodeSampler, Sampler
from vllm_redrafter.mlx.target import TreeTarget
from vllm_redrafter.mlx.tree_cache import TreeCache
from vllm_redrafter.utils.errors import ConfigError

UNLIMITED = 2**31 - 1
"""Tokens of an answer, for mlx-lm's -1."""
CLEARED_EVERY = 256
"""Tokens after which MLX gives unused memory back, as in mlx-lm."""

Progress = Callable[[int, int], None]


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    max_tokens: int = 256,
    draft_model: Drafter | None = None,
    *,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    prompt_cache: list[Any] | None = None,
    cached_text: Sequence[int] = (),
    prefill_step_size: int = 2048,
    prompt_progress_callback: Progress | None = None,
    **refused: Any,
) -> Iterator[GenerationResponse]:
    """The answer to a prompt, token by token, as `mlx_lm.stream_generate` gives it.

    Args:
        max_tokens: of the answer; -1 for no limit.
        draft_model: of `load_drafter`, for this model; None to decode by mlx-lm alone.
        sampler: of `mlx_lm.sample_utils`, or another that draws from `mx.random.state`. After
            `mx.random.seed` the same tokens come, whatever is drafted.
        logits_processors: see the tokens up to a node; drafts are chains then.
        prompt_cache: of this model, with the text before the prompt; it takes prompt and answer.
        cached_text: tokens before the prompt, where known: for matches and logits processors.
        refused: mlx-lm's other arguments, which speculation does not take.

    Raises:
        ConfigError: the drafter is for another model, or an argument is refused.
        ValueError: there is no prompt, or no token to output.
    """
    more = {
        "sampler": sampler,
        "logits_processors": logits_processors,
        "prompt_cache": prompt_cache,
        "prefill_step_size": prefill_step_size,
        "prompt_progress_callback": prompt_progress_callback,
    }
    if draft_model is None:
        yield from mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens, **more, **refused)
        return
    _check(model, draft_model, max_tokens, refused)
    wrapped = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
    tokens = _encoded(wrapped, prompt)
    caches = draft_model.target.make_cache() if prompt_cache is None else prompt_cache
    draft_model.target.adopt(caches)
    answer = _answer(
        draft_model,
        caches,
        cached_text,
        tokens,
        UNLIMITED if max_tokens < 0 else max_tokens,
        NodeSampler(sampler, logits_processors),
        prefill_step_size,
        prompt_progress_callback or (lambda read, of: None),
    )
    with wired_limit(model, [generation_stream]), closing(answer):
        yield from _responses(wrapped, len(tokens), max_tokens, answer)


def _check(model: nn.Module, drafter: Drafter, max_tokens: int, refused: dict[str, Any]) -> None:
    if drafter.target.model is not model:
        raise ConfigError(
            "draft_model was made for another model object: call load_drafter with this one"
        )
    if max_tokens == 0:
        raise ValueError("max_tokens must not be 0; give -1 for no limit")
    for name, value in refused.items():
        if value is not None:
            raise ConfigError(
                f"{name}={value!r} is refused beside a drafter of ours: leave it out, or decode "
                "without draft_model"
            )


def _encoded(tokenizer: TokenizerWrapper, prompt: str | mx.array | Sequence[int]) -> list[int]:
    if isinstance(prompt, str):
        bos = tokenizer.bos_token
        prompt = tokenizer.encode(
            prompt, add_special_tokens=bos is None or not prompt.startswith(bos)
        )
    tokens = [*map(int, prompt)]
    if not tokens:
        raise ValueError("the prompt is empty")
    return tokens


def _answer(
    drafter: Drafter,
    caches: list[TreeCache],
    cached_text: Sequence[int],
    prompt: list[int],
    max_tokens: int,
    sampler: NodeSampler,
    prefill_step_size: int,
    progress: Progress,
) -> Generator[Token]:
    """Read the prompt, and decode; ended or closed, it leaves the output in the caches."""
    known = caches[0].length + len(prompt)
    last, length = prompt[-1], known
    try:
        with mx.stream(generation_stream):
            _prefill(drafter.target, caches, prompt, prefill_step_size, progress)
        tokens = Decoder(drafter, caches, cached_text, prompt, sampler).tokens(max_tokens)
        for count in range(1, max_tokens + 1):
            # Not around the `yield`: the caller computes in a stream of its own.
            with mx.stream(generation_stream):
                token = next(tokens)
            if count == 1:
                progress(len(prompt), len(prompt))
            known, last, length = known + 1, token.id, caches[0].length
            yield token
            if count % CLEARED_EVERY == 0:
                mx.clear_cache()
        _complete(drafter.target, caches, known, last)
    except GeneratorExit:
        if caches[0].length == length:  # else another answer has used them since
            _complete(drafter.target, caches, known, last)
        raise
    except BaseException:
        for cache in caches:
            cache.trim_to(known - 1)
        raise


def _complete(target: TreeTarget, caches: list[TreeCache], known: int, last: int) -> None:
    """Leave the first `known` tokens of the text in the caches, whatever was accepted or begun."""
    for cache in caches:
        cache.trim_to(known)
    if caches[0].length < known:
        with mx.stream(generation_stream):
            target.forward(mx.array([last]), caches)
            mx.async_eval([cache.state for cache in caches])  # type: ignore[no-untyped-call]


def _prefill(
    target: TreeTarget,
    caches: list[TreeCache],
    prompt: list[int],
    step_size: int,
    progress: Progress,
) -> None:
    """Read all of a prompt but its last token, whose logits the first step needs."""
    read, size = 0, len(prompt)
    progress(0, size)
    while read < size - 1:
        end = min(read + step_size, size - 1)
        target.forward(mx.array(prompt[read:end]), caches)
        mx.eval([cache.state for cache in caches])  # not the logits
        read = end
        progress(read, size)
        mx.clear_cache()


def _responses(
    tokenizer: TokenizerWrapper, prompt_size: int, max_tokens: int, answer: Iterator[Token]
) -> Iterator[GenerationResponse]:
    """The text of the tokens, up to one that ends it or to the last one."""
    detokenizer, started = tokenizer.detokenizer, perf_counter()
    prompt_seconds = 0.0
    for count, token in enumerate(answer, 1):
        if count == 1:
            prompt_seconds, started = perf_counter() - started, perf_counter()
        is_stop = token.id in tokenizer.eos_token_ids
        is_last = is_stop or count == max_tokens
        if not is_stop:
            detokenizer.add_token(token.id)
        if is_last:
            detokenizer.finalize()
        reason = "stop" if is_stop else "length"
        yield GenerationResponse(
            text=detokenizer.last_segment,
            token=token.id,
            logprobs=token.logprobs,
            from_draft=token.from_draft,
            prompt_tokens=prompt_size,
            prompt_tps=prompt_size / prompt_seconds,
            generation_tokens=count,
            generation_tps=count / (perf_counter() - started),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=reason if is_last else None,
        )
        if is_last:
            return
