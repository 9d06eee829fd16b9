# SPDX-License-Identifier: Apache-2.0
"""The target's hidden states of whole texts, from vLLM's own `extract_hidden_states`.

That method keeps what comes out of some layers, of the last one *before* the final norm, in a KV
cache group of its own. A connector saves a finished request's rows to a file and names it in the
request's output; it is read and deleted here. Prompts are read whole, and not from the cache.
"""

import fcntl
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm import EngineArgs, RequestOutput, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    cleanup_hidden_states,
    extract_from_kv_cache,
    load_hidden_states,
)
from vllm.model_executor.model_loader import get_model_cls
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from vllm_redrafter.data.settings import CaptureSettings
from vllm_redrafter.offline.llm import (
    EngineRequest,
    failures_while,
    run_requests,
    start_llm,
    start_of,
    with_further,
)
from vllm_redrafter.utils.errors import ConfigError

WRITING_SECONDS = 300.0
"""For the files of the last requests."""

BATCHED_TOKENS = 8192
"""Tokens of a step: where prompts are not read in parts, at least the longest."""


class HiddenStatesEngine:
    """The target in vLLM, reading text; see `capture.StartEngine`.

    ConfigError: vLLM cannot start, or its class of the target does not hand out hidden states.
    """

    def __init__(
        self,
        target: str,
        settings: CaptureSettings,
        layers: Sequence[int],
        longest: int,
        scratch: Path,
    ) -> None:
        self._in_flight = settings.in_flight
        connector: dict[str, Any] = {
            "kv_connector": ExampleHiddenStatesConnector.__name__,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(scratch)},
        }
        if current_platform.is_cpu():
            connector["kv_connector"] = _CpuHiddenStatesConnector.__name__
            connector["kv_connector_module_path"] = __name__
        # What goes into the layer behind each.
        read = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [*layers]}}
        own: dict[str, Any] = {
            "dtype": settings.dtype,
            "tensor_parallel_size": settings.engine.tensor_parallel_size,
            "max_model_len": longest + 1,  # vLLM answers every prompt
            "enable_prefix_caching": False,
            "enable_chunked_prefill": False,
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": read,
            },
            "kv_transfer_config": connector,
        }
        usual = {
            "max_num_seqs": settings.in_flight,
            "max_num_batched_tokens": max(longest + 1, BATCHED_TOKENS),
        }
        arguments = with_further(settings.engine, own, usual)
        _check_hands_out_states(target, settings.dtype, settings.engine.further_arguments())
        self._llm = start_llm(target, ends_with_this_process=True, **arguments)

    def states(self, texts: Iterable[tuple[int, list[int]]]) -> Iterator[tuple[int, Tensor]]:
        """From (a name, tokens) to (the name, states), in any order.

        States are [tokens, (n + 1) H]: of n layers, in ascending order, then what enters the final
        norm.
        """
        params = SamplingParams(
            max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        waiting = iter(texts)

        def next_request() -> EngineRequest | None:
            text = next(waiting, None)
            return None if text is None else EngineRequest(str(text[0]), text[1], params)

        saved: deque[tuple[int, str]] = deque()
        engine = self._llm.llm_engine
        with failures_while("capturing"):
            for outputs in run_requests(engine, next_request, self._in_flight):
                saved.extend((int(o.request_id), _path_of(o)) for o in outputs if o.finished)
                while saved and _is_written(saved[0][1]):
                    yield _taken(*saved.popleft())
            deadline = time.monotonic() + WRITING_SECONDS
            while saved:
                # A finished request is saved by the engine's next step.
                engine.step()
                if _is_written(saved[0][1]):
                    yield _taken(*saved.popleft())
                elif time.monotonic() > deadline:
                    raise RuntimeError(f"no hidden states in {saved[0][1]}")

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def _check_hands_out_states(target: str, dtype: str, arguments: dict[str, Any]) -> None:
    """Raise a ConfigError unless the target's class does, which vLLM finds when it has loaded it.

    Its error is then in a worker's log alone.
    """
    with start_of(target):
        args = EngineArgs(model=os.path.expanduser(target), **{"dtype": dtype, **arguments})
        kind = get_model_cls(args.create_model_config())
    if not supports_eagle3(kind):
        raise ConfigError(
            f"capture: vLLM's {kind.__name__} does not hand out hidden states (it is no "
            "SupportsEagle3); train without --hidden-states, and with --target-layers none"
        )


def _path_of(output: RequestOutput) -> str:
    where = (output.kv_transfer_params or {}).get("hidden_states_path")
    if where is None:
        raise RuntimeError(f"request {output.request_id} names no file of hidden states")
    return str(where)


def _is_written(path: str) -> bool:
    """Whether vLLM has let go of the file's lock; waiting for it would stop an engine here."""
    with Path(f"{path}.lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _taken(name: int, path: str) -> tuple[int, Tensor]:
    """A saved request's hidden states; its files go away."""
    states = load_hidden_states(path)["hidden_states"].clone()
    cleanup_hidden_states(path)
    return name, states.flatten(1)


class _CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """vLLM's connector for workers without CUDA: it copies on a CUDA stream to pinned memory."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        assert self._kv_cache is not None
        blocks = torch.tensor(pending.block_ids).unsqueeze(1)
        slots = (blocks * self._block_size + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        lock = self._lock_fds.pop(pending.req_id, None)
        self._write_tensors(tensors, _COPIED, pending.filename, lock)
        self._req_copy_events[pending.req_id] = _COPIED


_COPIED: Any = SimpleNamespace(query=lambda: True, synchronize=lambda: None)
"""The event of a finished copy."""
