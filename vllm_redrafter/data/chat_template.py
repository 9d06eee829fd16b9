# SPDX-License-Identifier: Apache-2.0
"""The target's chat template, given messages as vLLM's server gives them."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_redrafter.utils.errors import ConfigError, one_line

MARK = "VLLM REDRAFTER MARKS THE TURN"
"""Stands in for a turn while its place in what a template makes is looked for."""

_IN_PARTS = """\
{%- set in_parts = namespace(messages=[]) %}
{%- for message in messages %}
{%- if message.content is string %}
{%- set message = dict(message, content=[{'type': 'text', 'text': message.content}]) %}
{%- endif %}
{%- set in_parts.messages = in_parts.messages + [message] %}
{%- endfor %}
{%- set messages = in_parts.messages +%}"""


class ChatTemplate:
    """Writes messages as the target expects them; its tokenizer has a chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._template = of_texts(tokenizer)

    def apply(self, messages: Sequence[Mapping[str, str]], tokenize: bool = False) -> Any:
        """Text or token ids, up to the next answer; ConfigError where the template refuses it."""
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=tokenize,
                return_dict=False,
            )
        except Exception as error:  # a template is a program of somebody else's
            reason = one_line(error) or type(error).__name__
            raise ConfigError(f"the target's chat template refuses it: {reason}") from error


def of_texts(tokenizer: Any) -> Any:
    """The chat template, made to take texts where it takes content in parts alone.

    vLLM's server looks for a loop over a message's parts in the template, and then gives parts. A
    message in parts that comes out whole shows the same.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str):  # none, or several by name
        return template
    part = {"type": "text", "text": MARK, "leak": "VLLM REDRAFTER'S PART AS IT IS"}
    turns = [{"role": role, "content": [part]} for role in ("user", "assistant", "user")]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # it takes text, or what it refuses is said when it is asked to
        return template
    return _IN_PARTS + template if MARK in text and part["leak"] not in text else template
