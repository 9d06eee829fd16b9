"""The target of `--train-small`: a small Llama that learns to write Python in two minutes.

Weights are kept in float32 and multiplied in bfloat16 where the processor has instructions for
it. Muon on the matrices learns about twice as much per token as AdamW, and tokens are what a
CPU has too few of.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.optim import _muon
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vllm_redrafter.training.trainer import warmup_cosine
from vllm_redrafter.utils.patching import patched
from vllm_redrafter.utils.processor import fast_dtype
from vllm_redrafter.utils.progress import progress_bar

BOS, EOS = "<s>", "</s>"


@dataclass(frozen=True)
class TargetSettings:
    """Sizes and training of the target; all that decides what it becomes, besides the text."""

    vocab_size: int = 320
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 6
    num_heads: int = 4
    max_length: int = 512
    block_size: int = 256
    batch_size: int = 8
    num_steps: int = 200
    muon_learning_rate: float = 0.02
    adam_learning_rate: float = 3e-3
    warmup_steps: int = 15
    seed: int = 0


def make_target(
    folder: Path, sources: Sequence[str], settings: TargetSettings, console: Console
) -> float:
    """Train a tokenizer and a Llama on the sources, and save both.

    Returns:
        The loss at the end, per token.
    """
    tokenizer = train_tokenizer(sources, settings.vocab_size)
    stream = torch.tensor([token for ids in tokenizer(list(sources))["input_ids"] for token in ids])
    torch.manual_seed(settings.seed)
    model = LlamaForCausalLM(llama_config(tokenizer, settings))
    loss = train(model, windows(stream, settings), settings, console)
    # Nothing but the tokens: whoever reads this file must not find sampling defaults.
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return loss


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that begins every text with BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[bos]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)


def windows(stream: Tensor, settings: TargetSettings) -> Iterator[Tensor]:
    """Batches without end, [batch_size, block_size], cut from the text at random places."""
    generator = torch.Generator().manual_seed(settings.seed)
    places = stream.shape[0] - settings.block_size
    offset = torch.arange(settings.block_size)
    while True:
        start = torch.randint(places, (settings.batch_size, 1), generator=generator)
        yield stream[start + offset]


def llama_config(tokenizer: PreTrainedTokenizerFast, settings: TargetSettings) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads,
        max_position_embeddings=settings.max_length,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def train(
    model: Any, batches: Iterator[Tensor], settings: TargetSettings, console: Console
) -> float:
    """Train in place; returns the smoothed loss at the end."""
    # The copy computes, the model itself keeps what small updates would lose in bfloat16.
    fast = copy.deepcopy(model).to(fast_dtype())
    optimizers = _optimizers(model, settings)
    smoothed = 0.0
    with progress_bar(console) as progress, native_muon():
        task = progress.add_task("training the target", total=settings.num_steps, status="")
        for step in range(settings.num_steps):
            factor = warmup_cosine(step, settings.warmup_steps, settings.num_steps)
            loss = _train_step(model, fast, optimizers, next(batches), factor)
            smoothed = 0.95 * smoothed + 0.05 * loss if step else loss
            progress.update(task, advance=1, status=f"loss {smoothed:.2f}")
    return smoothed


def _optimizers(model: Any, settings: TargetSettings) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms; `peak` is the full rate."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon_rate, adam_rate = settings.muon_learning_rate, settings.adam_learning_rate
    return [
        torch.optim.Muon([{"params": matrices, "peak": muon_rate}], lr=muon_rate, weight_decay=0.0),
        torch.optim.AdamW(
            [{"params": others, "peak": adam_rate}],
            lr=adam_rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
        ),
    ]


def native_muon() -> AbstractContextManager[None]:
    """While the body runs, Muon computes in a precision that this processor has.

    torch's orthogonalises in bfloat16 whatever the processor, and has no option for it. Without
    instructions for bfloat16 that is emulated, about forty times slower: the demo would take hours.
    """
    if fast_dtype() == torch.bfloat16:
        return nullcontext()
    return patched(_muon, "_zeropower_via_newtonschulz", orthogonalised)


def orthogonalised(
    grad: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float
) -> Tensor:
    """What torch's `_zeropower_via_newtonschulz` computes, in the gradient's own precision.

    With X = G / |G|, each step takes X to a X + (b M + c M M) X where M = X X^T.

    Args:
        grad: [rows, columns].
        ns_coefficients: a, b, c.
        ns_steps: how many steps.
        eps: the least |G| to divide by.
    """
    a, b, c = ns_coefficients
    is_tall = grad.shape[0] > grad.shape[1]
    x = (grad.T if is_tall else grad) / grad.norm().clamp(min=eps)
    for _ in range(ns_steps):
        m = x @ x.T
        x = torch.addmm(x, torch.addmm(m, m, m, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _train_step(
    model: Any,
    fast: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    tokens: Tensor,
    factor: float,
) -> float:
    """One step at `factor` of the peak learning rates; returns the loss."""
    loss = fast(input_ids=tokens, labels=tokens, use_cache=False).loss
    torch.autograd.backward(loss)
    pairs = list(zip(model.parameters(), fast.parameters(), strict=True))
    for kept, used in pairs:
        kept.grad, used.grad = used.grad.float(), None
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        optimizer.step()
    with torch.no_grad():
        for kept, used in pairs:
            used.copy_(kept)
    return float(loss.detach())
