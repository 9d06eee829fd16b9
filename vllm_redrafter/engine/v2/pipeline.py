# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: accepted paths and trees of the last stage, on the stages before it.

The last stage alone samples and drafts. The others verify the same trees in their own layers: they
need each draft before its step, and the accepted paths to compact their own K and V. Both travel
behind the tokens that vLLM sends of step T and earlier stages take in step T + stages:

- No request is scheduled in between, so its tree is there before it is verified.
- A block can be found by its hash once the scheduler has read the output of the step that filled
  it: after step T + stages was handed out, or earlier if it is paused (`UNREAD_STEPS`).
- Requests that were aborted or preempted in between are left out: their blocks may be others'.
"""

from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.pp_utils import PendingRecv, PPHandler, compute_need_sampled_mask
from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils

from vllm_redrafter.engine.v2.stats import cuda
from vllm_redrafter.engine.v2.verification import TreeRowsInCache, TreeTable
from vllm_redrafter.utils.errors import ConfigError

UNREAD_STEPS = "unread_steps"
"""The attribute of a SchedulerOutput: how many steps before it have outputs that were not read."""


def hand_on_aux_hidden_states(target: nn.Module) -> None:
    """Let each stage hand on what the stages before it return, or raise ConfigError."""
    try:
        eagle3_utils.verify_supports_aux_hidden_states_over_pp(target, "ReDrafter")
    except ValueError as error:
        raise ConfigError(
            f"the drafter reads layers of the target, and vLLM's {type(target).__name__} does not "
            "hand them on from one pipeline stage to the next: use a drafter that was trained "
            "with --target-layers none, or set --pipeline-parallel-size to 1"
        ) from error
    eagle3_utils.reserve_aux_intermediate_tensor_slots(target)


@dataclass(kw_only=True)
class _PendingTrees(PendingRecv):
    """What an earlier stage takes when a step's requests are scheduled again.

    `message` [R, numbers] int32 (see `TreePPHandler`) may be read after `event`. `verified` is
    where the step's trees are in the cache; None without trees, and after compaction.
    """

    message: Tensor
    verified: TreeRowsInCache | None


class TreePPHandler(PPHandler):
    """vLLM's handler, which also sends paths and trees.

    A request's message is its accepted path [K+1], then of its next tree the depths [K+1],
    ancestors [(K+1) * words] and number of nodes: what attention needs. vLLM sends the tokens.

    Attributes:
        table: this stage's trees; set before the first step.
        unread_steps: set before each step: the earlier steps with outputs that the scheduler has
            not read; None where it does not say.
    """

    table: TreeTable
    unread_steps: int | None = None

    def broadcast(self, sampled_token_ids: Tensor, *args: Any) -> None:
        """As vLLM does, which expects int64; the scorer gives int32."""
        super().broadcast(sampled_token_ids.long(), *args)

    def exchange_trees(self, input_batch: InputBatch) -> None:
        """Send the trees, or receive them, at the end of each step."""
        if compute_need_sampled_mask(input_batch) is None:
            return  # nobody's tokens are sent either
        if self.is_last_rank:
            # On the main stream, where the next step will write over the path.
            message = self._message(input_batch)
            self._broadcast(message)
            message.record_stream(self.broadcast_stream)
            return
        verification = self.table.verification
        verified = verification.rows.copy() if input_batch.num_draft_tokens else None
        with torch.cuda.stream(self.broadcast_stream):
            depths = self.table.trees.depths
            message = depths.new_empty(input_batch.num_reqs, sum(self._widths))
        event = self._broadcast(message)
        message.record_stream(self.main_stream)
        received = self.queue[-1]
        assert received is not None
        fields = {**vars(received), "event": event}
        self.queue[-1] = _PendingTrees(**fields, message=message, verified=verified)

    def get_prev_sampled_outputs(self, *args: Any) -> dict[str, Tensor] | None:
        """As vLLM does, which marks freed requests with -1; the trees as well."""
        oldest = self.queue[0] if self.queue else None
        unread = len(self.queue) if self.unread_steps is None else self.unread_steps
        read = len(self.queue) - unread
        for pending in islice(self.queue, max(1, read)):
            if isinstance(pending, _PendingTrees):
                self._compact(pending)
        outputs: dict[str, Tensor] | None = super().get_prev_sampled_outputs(*args)
        if outputs is not None:
            assert isinstance(oldest, _PendingTrees)
            self._keep_trees(oldest.message, outputs["idx_mapping"])
        return outputs

    def _compact(self, pending: _PendingTrees) -> None:
        """Move the accepted rows once; not of requests that were freed since."""
        if pending.verified is None:
            return
        is_kept = self.req_idx_gen_np[pending.idx_mapping_np] == pending.gen_at_receive_np
        self.main_stream.wait_event(pending.event)
        num_sampled = pending.num_sampled * async_tensor_h2d(is_kept, device=self.device)
        path = self._parts(pending.message)[0].contiguous()
        self.table.verification.compact(num_sampled, pending.verified, path)
        pending.verified = None

    def _keep_trees(self, message: Tensor, slots: Tensor) -> None:
        """Put the trees into the table; those of slot -1 into its unused last entry."""
        trees = self.table.trees
        _, depths, ancestors, num_nodes = self._parts(message)
        entries = torch.where(slots < 0, trees.num_nodes.shape[0] - 1, slots).long()
        trees.depths.index_copy_(0, entries, depths)
        trees.ancestors.index_copy_(0, entries, ancestors.view(-1, *trees.ancestors.shape[1:]))
        trees.num_nodes.index_copy_(0, entries, num_nodes.view(-1))

    def _message(self, input_batch: InputBatch) -> Tensor:
        trees, slots = self.table.trees, input_batch.idx_mapping
        parts = (
            self.table.verification.path[: input_batch.num_reqs],
            trees.depths[slots],
            trees.ancestors[slots].flatten(1),
            trees.num_nodes[slots][:, None],
        )
        return torch.cat(parts, dim=1)

    def _parts(self, message: Tensor) -> tuple[Tensor, ...]:
        return torch.split(message, self._widths, dim=1)

    @property
    def _widths(self) -> list[int]:
        trees = self.table.trees
        return [trees.depths.shape[1], trees.depths.shape[1], trees.ancestors[0].numel(), 1]

    def _broadcast(self, message: Tensor) -> Any:
        """Send or receive behind the main stream's work; returns the event of its end."""
        with torch.cuda.stream(self.broadcast_stream):
            self.broadcast_stream.wait_stream(self.main_stream)
            torch.distributed.broadcast(message, src=self.last_rank, group=self.broadcast_group)
            over = cuda.Event()
            over.record(self.broadcast_stream)
            return over
