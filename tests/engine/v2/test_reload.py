# SPDX-License-Identifier: Apache-2.0
"""`reload_weights` brings both models back from disk, into the same memory."""

from operator import attrgetter, methodcaller
from pathlib import Path

import pytest
import torch

from redrafter_testing.engines import inside_worker
from redrafter_testing.engines.forked_engine import Engine
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.gpu import memory_pool
from redrafter_testing.requests import few_tokens
from vllm_redrafter import load_drafter, save_drafter
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead

pytestmark = pytest.mark.engine

VOCAB = few_tokens.VOCAB
STORE, KEPT = "model_runner.table.earlier.store", ("state", "links")


def generate(llm: Engine) -> list[list[int]]:
    return llm.tokens(few_tokens.requests("greedy", count=4))


def write_drafter(folder: Path, first: int, hidden_size: int = 64) -> Path:
    """A random one that drafts 20 of the 24 tokens, those from `first` on."""
    torch.manual_seed(first)
    config = RecurrentConfig(VOCAB, hidden_size, hidden_size, draft_vocab_size=20)
    drafter = RecurrentHead(config)
    drafter.keep_tokens(torch.arange(first, first + 20))
    save_drafter(drafter, folder)
    return folder


def test_weights_come_back_in_place(few_tokens_target: Path, tmp_path: Path) -> None:
    """And with them all that is made while they load: a GPU's memory pool has no other."""
    drafter = write_drafter(tmp_path / "drafter", first=1)
    with interpreted_engine(
        few_tokens_target,
        setup=memory_pool.use,
        enable_prefix_caching=False,  # it would keep what spoiled weights computed
        speculative_config={"model": str(drafter), "num_speculative_tokens": 8},
    ) as llm:
        before = generate(llm)
        assert llm.accepted() > 4, "trees were hardly used"
        learned = llm.rpc(inside_worker.match_probabilities)
        ((addresses, weights),) = llm.rpc(inside_worker.drafter_tensors)

        assert llm.rpc(attrgetter(f"{STORE}.state"))[0][0] > 20
        llm.call(methodcaller("sleep", 2))
        # What is found afterwards must not be what the pool's memory happens to hold.
        state, links = (llm.rpc(attrgetter(f"{STORE}.{of}"))[0] for of in KEPT)
        assert not state[:2].any() and (links == -1).all(), "answers are not forgotten"
        ((_, lost),) = llm.rpc(inside_worker.drafter_tensors)
        assert not any(torch.equal(lost[name], weights[name]) for name in weights)
        llm.call(methodcaller("wake_up", ["kv_cache"]))
        with pytest.raises(RuntimeError, match="the engine sleeps: wake it up first"):
            llm.rpc("redrafter_swap", str(drafter))
        llm.call(methodcaller("wake_up", ["weights"]))
        # However the target's weights will come.
        ((_, awake),) = llm.rpc(inside_worker.drafter_tensors)
        torch.testing.assert_close(awake, weights, rtol=0, atol=0)
        llm.rpc("reload_weights")
        assert llm.rpc(inside_worker.match_probabilities) == learned, "it is no weight"
        assert generate(llm) == before
        llm.rpc("reset_redrafter_stats")
        assert generate(llm) == before
        assert llm.rpc("redrafter_stats")[0]["accepted_earlier_tokens"] > 20
        ((reloaded, restored),) = llm.rpc(inside_worker.drafter_tensors)
        assert reloaded == addresses
        torch.testing.assert_close(restored, weights, rtol=0, atol=0)

        write_drafter(drafter, first=4)
        llm.rpc("reload_weights")
        assert generate(llm) == before
        ((reloaded, changed),) = llm.rpc(inside_worker.drafter_tensors)
        assert reloaded == addresses
        expected = load_drafter(str(drafter)).state_dict()
        torch.testing.assert_close(changed, dict(expected), rtol=0, atol=0)

        llm.rpc(inside_worker.pretend_graphs_with_other_scales)
        with pytest.raises(RuntimeError, match=r"ConfigError: .*other K and V scales"):
            llm.rpc("reload_weights")
        llm.rpc(inside_worker.pretend_no_graphs)

        write_drafter(drafter, first=4, hidden_size=32)
        with pytest.raises(RuntimeError, match=r"ConfigError: .*hidden_size 64 -> 32"):
            llm.rpc("reload_weights")
        ((_, kept),) = llm.rpc(inside_worker.drafter_tensors)
        torch.testing.assert_close(kept, changed, rtol=0, atol=0, msg="it was reloaded in part")
