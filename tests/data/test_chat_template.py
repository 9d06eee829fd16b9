# SPDX-License-Identifier: Apache-2.0
"""What the target is sent of messages, whichever form of content its chat template takes."""

from typing import Any

import pytest

from redrafter_testing.engines.fake_engine import APPENDING, REWRITING
from vllm_redrafter.data.chat_template import ChatTemplate, of_texts
from vllm_redrafter.utils.errors import ConfigError

PARTS = APPENDING.replace("m['content']", "m.content[0].text")
LOOP = APPENDING.replace(
    "{{ m['content'] }}", "{% for p in m.content %}{{ p.text | trim }}{% endfor %}"
)
EITHER = APPENDING.replace(
    "{{ m['content'] }}",
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m['content'] %}{{ p['text'] | trim }}{% endfor %}{% endif %}",
)
MESSAGES = [
    {"role": "system", "content": "list"},
    {"role": "user", "content": "value 1 "},
    {"role": "assistant", "content": "name"},
    {"role": "user", "content": "value 2"},
]


def written(tokenizer: Any, template: str, messages: list[dict[str, str]] = MESSAGES) -> str:
    tokenizer.chat_template = template
    return str(ChatTemplate(tokenizer).apply(messages))


@pytest.mark.parametrize("template", [PARTS, LOOP, APPENDING], ids=str)
def test_all_that_was_said_is_in_what_the_target_is_sent(tokenizer: Any, template: str) -> None:
    text = written(tokenizer, template)
    assert text.replace("value 1 <", "value 1<") == (
        "<s>system\nlist<s>user\nvalue 1<s>assistant\nname</s><s>user\nvalue 2<s>assistant\n"
    )
    tokens = ChatTemplate(tokenizer).apply(MESSAGES, tokenize=True)
    assert tokens == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("template", [LOOP, EITHER, APPENDING, REWRITING, "\n" + LOOP], ids=str)
def test_it_is_what_vllms_server_sends(tokenizer: Any, template: str) -> None:
    hf = pytest.importorskip("vllm.renderers.hf")
    content_format = hf._detect_content_format(template, default="string")
    messages: list[dict[str, Any]] = [dict(message) for message in MESSAGES]
    if content_format == "openai":
        for message in messages:
            message["content"] = [{"type": "text", "text": message["content"]}]
    tokenizer.chat_template = template
    sent = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert written(tokenizer, template) == sent


@pytest.mark.parametrize(
    "template",
    [
        APPENDING.replace("m['content']", "m.content | tojson"),
        APPENDING.replace("m['content']", "m.content.strip()"),
        "{{ messages | length }}",
        "{{ raise_exception('no') }}",
        None,
    ],
    ids=str,
)
def test_a_template_that_takes_text_stays_as_it_is(tokenizer: Any, template: str | None) -> None:
    tokenizer.chat_template = template
    assert of_texts(tokenizer) == template


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no\nsystem message') }}", "no system message"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_whatever_a_template_raises_is_said_in_a_line(
    tokenizer: Any, template: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^the target's chat template refuses it: .*{reason}"):
        written(tokenizer, template)
