# SPDX-License-Identifier: Apache-2.0
"""A drafter that vLLM serves itself, `draft` in the speculative config: what it may be."""

from collections.abc import Mapping
from typing import Any

from vllm_redrafter.checkpoints.speculation import NODES
from vllm_redrafter.config import require_integers
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.names import METHOD

DRAFT = "draft"
METHODS = ("draft_model", "eagle", "eagle3", "mtp")
KEYS = ("method", "model", "num_speculative_tokens", "revision", "quantization")
"""Of `draft`, in vLLM's words."""
NOT_BESIDE = ("model", "revision", "beam_length", "candidates")
"""Keys of a drafter of ours."""
REFUSED = {
    "parallel_drafting": "drafts of one pass (P-EAGLE, PARD) are not joined with matches",
    "use_heterogeneous_vocab": "a tree has the target's tokens alone",
    "draft_sample_method": "a tree's tokens are the most probable ones",
}
"""Why not others of vLLM's."""
NEEDS_GPU = (
    "speculative config: 'draft' runs on GPUs alone (Model Runner V2), and this is vLLM's CPU "
    "backend: use the draft's own method there, or leave 'draft' out to verify continuations that "
    "are found in the text"
)


def shape_of_draft(requested: Mapping[str, Any]) -> dict[str, Any]:
    """Its part of `ReDrafterConfig`; ConfigError: it is none, or more than vLLM's drafter."""
    draft, owner = requested[DRAFT], f"speculative config: {DRAFT!r}"
    if not isinstance(draft, Mapping):
        example = '{"method": "draft_model", "model": "DRAFTER", "num_speculative_tokens": 4}'
        raise ConfigError(f"{owner} must be an object, as in {example}, got {draft!r}")
    others = ("method",) if requested.get("method") not in (None, METHOD) else ()
    if both := [key for key in (*others, *NOT_BESIDE) if key in requested]:
        raise ConfigError(f"{owner} is the drafter; leave {', '.join(map(repr, both))} out")
    for key in draft:
        if key not in KEYS:
            reason = REFUSED.get(key, f"known are {', '.join(KEYS)}")
            raise ConfigError(f"{owner} takes no {key!r}: {reason}; leave it out")
    if (method := draft.get("method")) not in METHODS:
        raise ConfigError(f"{owner}: 'method' must be one of {', '.join(METHODS)}, got {method!r}")
    model = draft.get("model")  # MTP layers are the target's own.
    if not (isinstance(model, str) or (method == "mtp" and model is None)):
        raise ConfigError(f"{owner}: 'model' must name its checkpoint, got {model!r}")
    length: Any = draft.get(NODES)
    require_integers(owner, num_speculative_tokens=length)
    nodes = requested.get(NODES)
    if nodes is None or (isinstance(nodes, int) and nodes < length):
        raise ConfigError(
            f"{owner} drafts {length} tokens in a row, and {NODES} beside it, the most tree nodes "
            f"verified per request and step, is {nodes}: give {length} or more"
        )
    return {"beam_length": length}
