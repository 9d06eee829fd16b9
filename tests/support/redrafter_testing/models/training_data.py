# SPDX-License-Identifier: Apache-2.0
"""A data folder as generate-data writes it, but written with transformers: no engine to start."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from vllm_redrafter.data.dataset import DatasetInfo, write_shard
from vllm_redrafter.data.fingerprint import target_fingerprint, tokenizer_fingerprint
from vllm_redrafter.data.rows import Row, TextRow
from vllm_redrafter.data.settings import SamplingSettings
from vllm_redrafter.data.target import Target
from vllm_redrafter.replay.target import load_target

PROMPT_LENGTH = 6


@torch.inference_mode()
def write_data(folder: Path, target: Path, num: int, max_tokens: int, seed: int = 5) -> list[Row]:
    """Greedy answers to random prompts, one shard; an answer ends with EOS or after max_tokens."""
    model = load_target(Target.open(target))
    sizes = model.config.get_text_config()
    vocab_size, eos = sizes.vocab_size, sizes.eos_token_id
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, vocab_size, (num, PROMPT_LENGTH), generator=generator)
    for _ in range(max_tokens):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    rows = []
    for index, ids in enumerate(tokens.tolist()):
        ends = [i for i in range(PROMPT_LENGTH, len(ids)) if ids[i] == eos]
        length = ends[0] + 1 if ends else len(ids)
        mask = [i >= PROMPT_LENGTH for i in range(length)]
        rows.append(Row(index, ids[:length], mask))
    folder.mkdir(parents=True, exist_ok=True)
    info = DatasetInfo(
        target=str(target),
        target_fingerprint=target_fingerprint(target),
        tokenizer_fingerprint=tokenizer_fingerprint(AutoTokenizer.from_pretrained(target)),
        template_fingerprint=None,
        prompts_fingerprint=f"random prompts of seed {seed}",
        num_conversations=num,
        shard_size=num,
        vocab_size=vocab_size,
        sampling=SamplingSettings(temperature=0.0, max_tokens=max_tokens),
    )
    info.save(folder)
    write_shard(folder, 0, rows)
    return rows


def answered(prompt: Sequence[int], answer: Sequence[int]) -> TextRow:
    """A prompt and what the target answered."""
    tokens = torch.tensor([*prompt, *answer], dtype=torch.int64)
    return TextRow(tokens, torch.arange(len(tokens)) >= len(prompt))
