# SPDX-License-Identifier: Apache-2.0
"""The user's turns in a row of a conversation file of any public form.

A row has a list of messages, or a text. All forms (ShareGPT, UltraChat, OpenAI, SpecForge) are read
alike. The assistant's answers are not read: the target writes them anew.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm_redrafter.utils.errors import ConfigError

ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot"),
}
"""Names of roles, in lower case; what others say (tools) does not follow from new answers."""

LISTS = ("messages", "conversations", "conversation", "items", "data", "turns", "prompt")
"""Where a row has messages: the first of these that has any counts."""
ALL_BY_USER = "turns"
"""The list whose bare texts are all the user's (MT-Bench); in others the assistant's alternate."""

TEXTS = ("prompt", "question")
"""Where a row has a text, if it has no messages. A question is a chat's turn, a prompt is not."""

SYSTEMS = ("system", "system_prompt")
"""Where a row has a system message beside its messages or its text."""
UNREAD = (
    *("tools", "functions", "documents", "context", "input", "history"),
    *("image", "images", "audio", "audios", "video", "videos", "files", "attachments"),
)
"""What belongs to a prompt and is not read, beside messages or in one: such a row is left out."""
NOTHING = ("[]", "{}", "null")
"""Such a column where a row has none of it, in JSON."""

ROLE_KEYS = ("role", "from")
CONTENT_KEYS = ("content", "value", "text")
TEXT_PARTS = ("text", "input_text")
"""Types of a content's parts."""

_ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
_FORM = "of an unknown form"
_NO_TEXT = "with something else than text"


class UnusableRow(ConfigError):
    """A row that cannot be used, where the others can: `detail` says why.

    `at` is where it was read, such as `prompts.jsonl, line 3`. `kind` is common to rows of the same
    trouble, as in `rows that are not JSON`.
    """

    def __init__(self, at: str, kind: str, detail: str) -> None:
        super().__init__(f"{at}: {detail}")
        self.kind = kind


@dataclass
class LeftOut:
    """Unusable rows: counted by kind, and shown with the first of each."""

    kinds: dict[str, tuple[int, UnusableRow]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(number for number, _ in self.kinds.values())

    def add(self, row: UnusableRow) -> None:
        number, first = self.kinds.get(row.kind, (0, row))
        self.kinds[row.kind] = number + 1, first

    def reasons(self) -> list[str]:
        """A line for each kind, the most frequent one first."""
        return [
            f"rows {kind}: {number}, the first: {first}"
            for kind, (number, first) in sorted(self.kinds.items(), key=lambda k: -k[1][0])
        ]

    def __str__(self) -> str:
        return "\n".join(f"left out: {reason}" for reason in self.reasons())


@dataclass(frozen=True)
class Conversation:
    """The user's messages `turns`, at least one; the target writes the answers.

    Attributes:
        bare: read as mere text, not as the messages of a chat.
        source: where it was read, for error messages; not compared.

    ConfigError: a turn is empty. UnusableRow: a text that no tokenizer takes.
    """

    turns: tuple[str, ...]
    system: str | None = None
    bare: bool = field(default=False, compare=False)
    source: str = field(default="a prompt", compare=False)

    def __post_init__(self) -> None:
        if not self.turns or not all(turn.strip() for turn in self.turns):
            raise ConfigError(f"{self.source}: expected text, got {self.turns!r}")
        for text in (self.system or "", *self.turns):
            if half := unpaired_surrogate(text):
                detail = f"{half} is half of a character, found in {shortened(text)}"
                raise UnusableRow(self.source, "with half of a character", detail)


def conversation_of(row: Any, at: str) -> Conversation:
    """Read a row (or the trouble with reading it) that was found `at` a place.

    UnusableRow: the form is unknown, the user says nothing, or the row has parts that are not read.
    """
    if isinstance(row, UnusableRow):
        raise row
    if not isinstance(row, dict):
        raise UnusableRow(at, _FORM, f"found {shortened(row)}, expected an object")
    for name in LISTS:
        if isinstance(row.get(name), list) and row[name]:
            return _read_messages(name, row[name], _systems_beside(row, at), at)
    for name in TEXTS:
        if (text := row.get(name)) is not None:
            if not isinstance(text, str):
                detail = f"{name!r} must be text or messages, found {shortened(text)}"
                raise UnusableRow(at, _FORM, detail)
            if not text.strip():
                raise _silent(at)
            system = "\n\n".join(_systems_beside(row, at)) or None
            return Conversation((text,), system, name == "prompt" and system is None, at)
    if any(row.get(name) == [] for name in LISTS):
        raise _silent(at)
    found = shortened(", ".join(map(repr, row)) or "nothing", plain=True)
    expected = ", ".join(dict.fromkeys((*LISTS, *TEXTS)))
    raise UnusableRow(at, _FORM, f"found {found}; expected text or messages in one of {expected}")


def shortened(value: Any, length: int = 80, plain: bool = False) -> str:
    text = value if plain else repr(value)
    return text if len(text) <= length else f"{text[:length]}…"


def unpaired_surrogate(text: str) -> str | None:
    """The first one, as Python writes it; None where UTF-8 can express the text.

    JSON can express one, and a byte that is not UTF-8 becomes one on the command line.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return repr(text[error.start])
    return None


def _read_messages(name: str, messages: list[Any], system: list[str], at: str) -> Conversation:
    """Read the list `name`; `system` has the messages that stand beside it."""
    turns: list[str] = []
    others: UnusableRow | None = None
    for position, message in enumerate(messages):
        place = f"{name!r}[{position}]"
        if isinstance(message, str):
            by_user = name == ALL_BY_USER or position % 2 == 0
            speaker, content = "user" if by_user else "assistant", message
        else:
            speaker, content = _speaker_and_content(message, place, at)
        role = _ROLE_OF.get(speaker.strip().lower())
        if role is None and others is None:
            detail = f"{place}: unknown role {speaker!r}; expected one of {', '.join(_ROLE_OF)}"
            others = UnusableRow(at, "with another role", detail)
        if role not in ("user", "system"):
            continue
        _check_all_read(message, place, at)
        text = _text(content, place, at)
        if not text.strip():
            continue
        if role == "system":
            if turns:
                detail = f"{place} is a system message; one must come before the user's turns"
                raise UnusableRow(at, "with a late system message", detail)
            if text not in system:
                system.append(text)
            continue
        if others is not None:
            raise others
        turns.append(text)
    if not turns:
        raise others or _silent(at)
    return Conversation(tuple(turns), "\n\n".join(system) or None, source=at)


def _speaker_and_content(message: Any, place: str, at: str) -> tuple[str, Any]:
    def first(keys: tuple[str, ...]) -> Any:
        """The first key's value that is not null; Parquet has all keys."""
        found = message if isinstance(message, dict) else {}
        return next((found[key] for key in keys if found.get(key) is not None), None)

    speaker = first(ROLE_KEYS)
    if not isinstance(speaker, str):
        keys = " or ".join(map(repr, ROLE_KEYS))
        detail = f"{place} must be text, or say in {keys} whose it is; found {shortened(message)}"
        raise UnusableRow(at, _FORM, detail)
    return speaker, first(CONTENT_KEYS)


def _text(content: Any, place: str, at: str) -> str:
    """A message's text; of several parts, as vLLM's server joins them."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [None]:
        text = part
        if isinstance(part, dict) and part.get("type") in TEXT_PARTS:
            text = part.get("text")
        if not isinstance(text, str):
            detail = f"{place} must be text or parts of text; found {shortened(content)}"
            raise UnusableRow(at, _NO_TEXT, detail)
        texts.append(text)
    return "\n".join(filter(None, texts))


def _systems_beside(row: dict[str, Any], at: str) -> list[str]:
    """The system messages beside a row's messages or text; nothing else may stand there."""
    _check_all_read(row, "the row", at)
    system: list[str] = []
    for name in SYSTEMS:
        text = row.get(name) or ""
        if not isinstance(text, str):
            raise UnusableRow(at, _FORM, f"{name!r} must be text, found {shortened(text)}")
        if text.strip() and text not in system:
            system.append(text)
    return system


def _check_all_read(found: Any, place: str, at: str) -> None:
    """Refuse a row, or a message, of which a part would be ignored."""
    for name in UNREAD if isinstance(found, dict) else ():
        if (value := found.get(name)) and value not in NOTHING:
            detail = f"{place} has {name!r}, which is not read: {shortened(value)}"
            raise UnusableRow(at, _NO_TEXT, detail)


def _silent(at: str) -> UnusableRow:
    return UnusableRow(at, "without a word from the user", "the user says nothing")
