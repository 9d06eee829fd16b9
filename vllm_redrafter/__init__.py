# SPDX-License-Identifier: Apache-2.0
"""Recurrent Drafter (arXiv 2403.09919) for vLLM: tree speculation as an out-of-tree plugin.

Names are imported when they are asked for: vLLM imports this package in all of its processes, and
the command line answers `--help`, without waiting for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_redrafter.checkpoints.reading import load_drafter
    from vllm_redrafter.checkpoints.writing import save_drafter
    from vllm_redrafter.config import ReDrafterConfig
    from vllm_redrafter.heads.head import DraftHead, HeadConfig
    from vllm_redrafter.heads.registry import new_head, register
    from vllm_redrafter.tree.acceptance import AcceptedPath, accept_path
    from vllm_redrafter.tree.beam_search import ExploredNodes
    from vllm_redrafter.tree.token_tree import TokenTree
    from vllm_redrafter.utils.errors import ConfigError

_HOMES = {
    "AcceptedPath": "tree.acceptance",
    "ConfigError": "utils.errors",
    "DraftHead": "heads.head",
    "ExploredNodes": "tree.beam_search",
    "HeadConfig": "heads.head",
    "ReDrafterConfig": "config",
    "TokenTree": "tree.token_tree",
    "accept_path": "tree.acceptance",
    "load_drafter": "checkpoints.reading",
    "new_head": "heads.registry",
    "register": "heads.registry",
    "save_drafter": "checkpoints.writing",
}

__all__ = [
    "AcceptedPath",
    "ConfigError",
    "DraftHead",
    "ExploredNodes",
    "HeadConfig",
    "ReDrafterConfig",
    "TokenTree",
    "accept_path",
    "load_drafter",
    "new_head",
    "register",
    "save_drafter",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
