"""Recurrent Drafter (arXiv 2403.09919) for vLLM: tree speculation as an out-of-tree plugin."""

from vllm_redrafter.beam_search import ExploredNodes, beam_search
from vllm_redrafter.checkpoints import load_drafter, save_drafter
from vllm_redrafter.config import ConfigError, DrafterConfig, ReDrafterConfig
from vllm_redrafter.drafter import Drafter
from vllm_redrafter.scorer import AcceptedPath, accept_path
from vllm_redrafter.token_tree import TokenTree

__all__ = [
    "AcceptedPath",
    "ConfigError",
    "Drafter",
    "DrafterConfig",
    "ExploredNodes",
    "ReDrafterConfig",
    "TokenTree",
    "accept_path",
    "beam_search",
    "load_drafter",
    "save_drafter",
]
