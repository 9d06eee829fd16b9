"""`generate` and `stream_generate` with mlx-lm's signatures; the draft model is a `Drafter`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import GenerationResponse, generation_stream, wired_limit
from mlx_lm.models.cache import trim_prompt_cache
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


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int],
    verbose: bool = False,
    **arguments: Any,
) -> str:
    """The answer to a prompt, as `mlx_lm.generate` gives it.

    Args:
        model, tokenizer: of `mlx_lm.load`.
        prompt: text or tokens.
        verbose: print the answer as it comes.
        arguments: of `stream_generate`.
    """
    text = ""
    for response in stream_generate(model, tokenizer, prompt, **arguments):
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    return text


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
    prefill_step_size: int = 2048,
    prompt_progress_callback: Progress | None = None,
    **refused: Any,
) -> Iterator[GenerationResponse]:
    """The answer to a prompt, token by token, as `mlx_lm.stream_generate` gives it.

    Args:
        model, tokenizer: of `mlx_lm.load`.
        prompt: text or tokens.
        max_tokens: of the answer; -1 for no limit.
        draft_model: of `load_drafter`, for this model; None to decode plainly, by mlx-lm.
        sampler: of `mlx_lm.sample_utils`, or another that draws from `mx.random.state`. After
            `mx.random.seed` the same tokens come, whatever is drafted.
        logits_processors: see the tokens up to a node; drafts are chains then.
        prompt_cache: of this model, with what stands before the prompt; it takes prompt and answer,
            but for the last token.
        prefill_step_size: tokens of the prompt that are read at once.
        prompt_progress_callback: is called with the tokens read of the prompt, and all of them.
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
    most = UNLIMITED if max_tokens < 0 else max_tokens
    with wired_limit(model, [generation_stream]):
        yield from _responses(
            wrapped,
            tokens,
            most,
            _Prefill(draft_model.target, caches, prefill_step_size, prompt_progress_callback),
            lambda: Decoder(
                draft_model, caches, tokens, NodeSampler(sampler, logits_processors)
            ).tokens(most),
        )


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
    """The prompt's tokens, with special ones where the text does not begin with them."""
    if isinstance(prompt, str):
        bos = tokenizer.bos_token
        prompt = tokenizer.encode(
            prompt, add_special_tokens=bos is None or not prompt.startswith(bos)
        )
    tokens = prompt.tolist() if isinstance(prompt, mx.array) else list(prompt)
    if not tokens:
        raise ValueError("the prompt is empty")
    return tokens


class _Prefill:
    """Reads a prompt but for its last token."""

    def __init__(
        self,
        target: TreeTarget,
        caches: list[TreeCache],
        step_size: int,
        progress: Progress | None,
    ) -> None:
        self.target, self.caches = target, caches
        self._step_size, self._progress = step_size, progress or (lambda read, of: None)

    def read(self, tokens: Sequence[int]) -> None:
        read, size = 0, len(tokens)
        self._progress(0, size)
        while read < size - 1:
            end = min(read + self._step_size, size - 1)
            self.target.forward(mx.array(tokens[read:end]), self.caches)
            # Of the logits nobody asks for anything: they are never computed.
            mx.eval([cache.state for cache in self.caches])
            read = end
            self._progress(read, size)
            mx.clear_cache()


def _responses(
    tokenizer: TokenizerWrapper,
    prompt: list[int],
    most: int,
    prefill: _Prefill,
    answer: Callable[[], Iterator[Token]],
) -> Iterator[GenerationResponse]:
    detokenizer, stops = tokenizer.detokenizer, tokenizer.eos_token_ids
    started = perf_counter()
    before, count = prefill.caches[0].length, 0
    try:
        with mx.stream(generation_stream):
            prefill.read(prompt)
            tokens = answer()
            while count < most:
                token = next(tokens)
                if not count:
                    prompt_seconds, started = perf_counter() - started, perf_counter()
                    prefill._progress(len(prompt), len(prompt))
                count += 1
                is_last = token.id in stops or count == most
                if token.id not in stops:
                    detokenizer.add_token(token.id)
                if is_last:
                    detokenizer.finalize()
                yield GenerationResponse(
                    text=detokenizer.last_segment,
                    token=token.id,
                    logprobs=token.logprobs,
                    from_draft=token.from_draft,
                    prompt_tokens=len(prompt),
                    prompt_tps=len(prompt) / prompt_seconds,
                    generation_tokens=count,
                    generation_tps=count / max(perf_counter() - started, 1e-9),
                    peak_memory=mx.get_peak_memory() / 1e9,
                    finish_reason=_finish_reason(token.id in stops, is_last),
                )
                if is_last:
                    break
                if count % CLEARED_EVERY == 0:
                    mx.clear_cache()
    finally:
        # A step may have accepted more than was asked for, or a pass have been begun.
        known = before + len(prompt) + count
        trim_prompt_cache(prefill.caches, max(prefill.caches[0].length - known, 0))


def _finish_reason(is_stop: bool, is_last: bool) -> str | None:
    if not is_last:
        return None
    return "stop" if is_stop else "length"
