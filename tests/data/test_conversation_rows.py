# SPDX-License-Identifier: Apache-2.0
"""Rows of all public forms: what the user says in them, and which cannot be used."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from vllm_redrafter.data.conversation_rows import (
    LISTS,
    UNREAD,
    Conversation,
    UnusableRow,
    conversation_of,
)

ASKED = ("One?", "Two?")
SAID = Conversation(ASKED)
OPENAI: list[dict[str, Any]] = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2"},
]
SPEAKERS = {"user": "human", "assistant": "gpt"}
SHAREGPT = [{"from": SPEAKERS[m["role"]], "value": m["content"]} for m in OPENAI]
ALTERNATING = ["One?", "1", "Two?", "2"]


def read_of(row: dict[str, Any]) -> str:
    """What is read of a row, as the guide's table says it."""
    try:
        said = conversation_of(row, "")
    except UnusableRow as error:
        return f"left out, as a row {error.kind}"
    system = [] if said.system is None else [f"system: {said.system}"]
    return "; ".join([*system, *(f"{'text' if said.bare else 'user'}: {t}" for t in said.turns)])


GUIDE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
FORMS = re.findall(r"^\| (.+) \| `(\{.+\})` \| (.+) \|$", GUIDE, re.MULTILINE)
"""Of the guide's table: the form's name, a row, and what is read of it."""


def test_of_each_form_is_read_what_the_guide_says() -> None:
    assert len(FORMS) >= 15
    for _, row, read in FORMS:
        assert read_of(json.loads(row)) == read


def test_every_list_may_have_every_form_of_messages() -> None:
    for name, form in product(set(LISTS) - {"turns"}, (OPENAI, SHAREGPT, ALTERNATING)):
        assert conversation_of({"id": "1", name: form}, "") == SAID


def test_system_messages_come_before_the_users_turns() -> None:
    for role in ("system", "developer", "System"):
        row = {"messages": [{"role": "system", "content": "Be kind."}, *OPENAI]}
        row["messages"].insert(1, {"role": role, "content": "Be brief."})
        assert conversation_of(row, "") == Conversation(ASKED, system="Be kind.\n\nBe brief.")
    for name, nothing in product(("system", "system_prompt"), (None, "", " ")):
        assert conversation_of({name: "Be brief.", "data": ALTERNATING}, "").system == "Be brief."
        assert conversation_of({name: nothing, "data": ALTERNATING}, "") == SAID


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_not_read_leaves_its_row_out_wherever_it_stands(name: str) -> None:
    for value in (["a.png"], [{"name": "f"}], '[{"name": "f"}]', {"name": "f"}):
        for row, place in (
            ({"conversations": SHAREGPT, name: value}, "the row"),
            ({"prompt": "One?", name: value}, "the row"),
            ({"messages": [{**OPENAI[0], name: value}, *OPENAI[1:]]}, r"'messages'\[0\]"),
        ):
            with pytest.raises(UnusableRow, match=rf"^here: {place} has '{name}', which") as error:
                conversation_of(row, "here")
            assert error.value.kind == "with something else than text"
    for nothing in (None, "", "[]", "null", [], {}):
        row = {"messages": [{**m, name: nothing} for m in OPENAI], name: nothing}
        assert conversation_of(row, "") == SAID


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "assistant"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": "\ud83d"},
        {"role": "user", "content": " "},
    ],
)
def test_what_is_not_the_users_text_may_be_anything_or_missing(message: dict[str, Any]) -> None:
    parts = [{"type": "text", "text": "Two?", "image_url": None}, {"type": "input_text"}, "Please!"]
    parts[1]["text"] = "Or three?"  # type: ignore[index]  # a part
    row = {"messages": [OPENAI[0], message, {"role": "user", "content": parts}]}
    assert conversation_of(row, "") == Conversation(("One?", "Two?\nOr three?\nPlease!"))
    # Of any role after the user's last turn.
    assert conversation_of({"messages": [*OPENAI, TOOL]}, "") == SAID


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


TOOL = {"role": "tool", "content": "42"}
UNUSABLE: dict[str, list[tuple[Any, str]]] = {
    "with another role": [
        (
            {"messages": [*OPENAI[:2], TOOL, *OPENAI[2:]]},
            r"'messages'\[2\]: unknown role 'tool'; expected one of system, deve",
        )
    ],
    "with a late system message": [
        (
            {"messages": [*OPENAI, {"role": "system", "content": "Be kind."}]},
            r"'messages'\[4\] is a system message; one must",
        )
    ],
    "without a word from the user": [
        (row, "the user says nothing$")
        for row in (
            {"messages": [], "prompt": None},
            {"prompt": " "},
            {"conversations": [{"from": "gpt", "value": "Hello?"}]},
            user(None),
        )
    ],
    "of an unknown form": [
        ([1], r"found \[1\], expected an object"),
        ({}, "found nothing; expected text or messages in one of messages, conversations, "),
        ({"text": "x", "id": 1}, "found 'text', 'id'; expected"),
        ({"messages": "hi"}, "found 'messages'; expected"),
        ({"prompt": 7}, "'prompt' must be text or messages, found 7"),
        ({"messages": [7]}, r"'messages'\[0\] must be text, or say in 'role' or 'from' whose .* 7"),
        ({"messages": [{"role": 3, "content": "x"}]}, r"'messages'\[0\] must be text, or say"),
        ({"system": [1], "messages": OPENAI}, r"'system' must be text, found \[1\]"),
    ],
    "with something else than text": [
        (user(content), r"'messages'\[0\] must be text or parts of text; found")
        for content in (7, {"text": "x"}, [{"type": "image_url", "image_url": "x"}])
    ],
}


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [(kind, *case) for kind, cases in UNUSABLE.items() for case in cases],
)
def test_an_unusable_row_is_named_with_the_reason(kind: str, row: Any, message: str) -> None:
    with pytest.raises(UnusableRow, match=rf"^here: {message}") as error:
        conversation_of(row, "here")
    assert error.value.kind == kind
