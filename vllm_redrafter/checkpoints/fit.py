"""Does a drafter fit a target? The sizes that both must have."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm_redrafter.heads.head import HeadConfig


class SizeDifference(NamedTuple):
    """A size in which a drafter and a target differ.

    Attributes:
        entry: its name in config.json.
        what: its name in a sentence.
        drafter: the drafter's.
        target: the target's; None where its configuration does not say.
    """

    entry: str
    what: str
    drafter: int
    target: int | None


def size_differences(
    drafter: HeadConfig, hidden_size: int | None, vocab_size: int | None
) -> list[SizeDifference]:
    """All sizes in which they differ; none if the drafter fits.

    Args:
        drafter: its sizes.
        hidden_size: the target's.
        vocab_size: the target's.
    """
    compared = (
        SizeDifference("hidden_size", "hidden size", drafter.hidden_size, hidden_size),
        SizeDifference("vocab_size", "vocabulary size", drafter.vocab_size, vocab_size),
    )
    return [size for size in compared if size.drafter != size.target]


def differences_from(drafter: HeadConfig, target_config: Any) -> list[SizeDifference]:
    """The same for a target's transformers configuration.

    Args:
        drafter: its sizes.
        target_config: the target's; of a multimodal one the text model counts.
    """
    text = target_config.get_text_config()
    sizes = (getattr(text, name, None) for name in ("hidden_size", "vocab_size"))
    return size_differences(drafter, *sizes)
