# SPDX-License-Identifier: Apache-2.0
"""A small target that knows some answers by heart, and a drafter that knows them as well."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from redrafter_testing.engines.fake_engine import APPENDING
from redrafter_testing.engines.generation_runs import with_template
from redrafter_testing.models.tiny_models import add_tokenizer, make_reciting, make_target
from vllm_redrafter.data.rows import TextRow

TEMPLATE = "{# <tool_call> tool_call.name #}" + APPENDING
"""By what the comment says, mlx-lm knows how a target of this template calls tools."""

ANSWERS = {
    "weather in Paris": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
    ),
    "list values": "value 1, value 2, value 3, value 5, value 8, value 13, value 21, value 34",
    "names": "name 7, list 49; name 14, list 98; name 21, list 147; name 28, list 196",
}


def make_reciting_pair(folder: Path) -> tuple[Path, Path]:
    """Folders of the target and the drafter; a few seconds on one core."""
    target = folder / "reciting"
    # Two threads that share a core with others wait for each other most of the time.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = _train(target)
        return target, make_reciting(folder / "drafter", target, rows)
    finally:
        torch.set_num_threads(threads)


def _train(folder: Path) -> list[TextRow]:
    """Write the target; returns what it knows."""
    make_target(folder, seed=2, num_hidden_layers=2, initializer_range=0.1)
    model = LlamaForCausalLM.from_pretrained(folder)
    add_tokenizer(folder)
    with_template(folder, TEMPLATE)
    rows = [_row(AutoTokenizer.from_pretrained(folder), *pair) for pair in ANSWERS.items()]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        for row in rows:
            labels = torch.where(row.generated, row.tokens, -100)
            model(input_ids=row.tokens[None], labels=labels[None]).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return rows


def _row(tokenizer: object, question: str, answer: str) -> TextRow:
    prompt, answered = _tokens(tokenizer, question), _tokens(tokenizer, question, answer)
    return TextRow(answered, torch.arange(len(answered)) >= len(prompt))


def _tokens(tokenizer: object, question: str, answer: str | None = None) -> Tensor:
    messages = [{"role": "user", "content": question}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    text = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
        messages, tokenize=False, add_generation_prompt=answer is None
    )
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])  # type: ignore[operator]
