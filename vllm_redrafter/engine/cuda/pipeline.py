"""Pipeline parallelism: what the last stage accepts and drafts, on the stages before it.

The last stage alone samples and drafts. The others verify the same trees in their own layers, so
they need each draft before its step, and the accepted paths, to compact their own K and V.

vLLM sends the sampled and the draft tokens of step T to the earlier stages, on a stream of its
own, and they take them in step T + stages, before anything else. What is added here travels behind
them and is taken with them:

- No request is scheduled in between, so its tree is there before it is verified.
- The scheduler reads the output of step T once step T + stages has been handed out. So blocks are
  compacted before another request can find them by their hash.
- Requests that were aborted or preempted in between are left out: their blocks may be others'.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.pp_utils import PendingRecv, PPHandler, compute_need_sampled_mask
from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils

from vllm_redrafter.engine.cuda.tree_table import TreeTable
from vllm_redrafter.engine.cuda.verification import TreeRowsInCache
from vllm_redrafter.utils.errors import ConfigError


def of_all_stages(reasons: list[str]) -> list[str]:
    """Each stage's reasons, on all of them: a collective call."""
    pp = get_pp_group()
    if pp.world_size == 1:
        return reasons
    found: list[list[str]] = [[]] * pp.world_size
    torch.distributed.all_gather_object(found, reasons, group=pp.cpu_group)
    return list(dict.fromkeys(chain.from_iterable(found)))


def hand_on_aux_hidden_states(target: nn.Module) -> None:
    """Let each stage of a pipeline hand on what the stages before it return.

    Args:
        target: this stage's part of it, see `enable_aux_hidden_states`.

    Raises:
        ConfigError: its class does not do that.
    """
    try:
        eagle3_utils.verify_supports_aux_hidden_states_over_pp(target, "ReDrafter")
    except ValueError as error:
        raise ConfigError(
            f"the drafter reads layers of the target, and vLLM's {type(target).__name__} does not "
            "hand them on from one pipeline stage to the next: use a drafter that was trained "
            "without --target-layers, or set --pipeline-parallel-size to 1"
        ) from error
    eagle3_utils.reserve_aux_intermediate_tensor_slots(target)


@dataclass(kw_only=True)
class PendingTrees(PendingRecv):
    """What an earlier stage takes when a step's requests are scheduled again.

    Attributes:
        message: [R, numbers] int32, see `TreePPHandler`; to be read once `event` is over.
        verified: where the step's trees are in the cache; None where it verified none.
    """

    message: Tensor
    verified: TreeRowsInCache | None


class TreePPHandler(PPHandler):
    """vLLM's handler; it also sends paths and trees.

    A request's message are its accepted path [K+1], the depths [K+1], ancestors [(K+1) * words] and
    number of nodes of its next tree. An earlier stage needs no more of it than attention does: the
    tokens are vLLM's to send.

    Attributes:
        table: this stage's trees; to be set before the first step.
    """

    table: TreeTable

    def broadcast(
        self,
        sampled_token_ids: Tensor,
        num_sampled: Tensor,
        num_rejected: Tensor,
        input_batch: InputBatch,
    ) -> None:
        """As vLLM does, which asks for int64 and gets int32 from the scorer."""
        super().broadcast(sampled_token_ids.long(), num_sampled, num_rejected, input_batch)

    def broadcast_drafts(self, draft_tokens: Tensor, input_batch: InputBatch) -> None:
        """As vLLM does; then send the trees and what was accepted before them."""
        # On the main stream, where the next step will write over the path.
        message = self._message(input_batch)
        super().broadcast_drafts(draft_tokens, input_batch)
        if compute_need_sampled_mask(input_batch) is None:
            return
        with torch.cuda.stream(self.broadcast_stream):
            self.broadcast_stream.wait_stream(self.main_stream)
            message.record_stream(self.broadcast_stream)
            self._broadcast(message)

    def receive(self, input_batch: InputBatch) -> bool:
        """As vLLM does; the trees as well."""
        all_decode_next: bool = super().receive(input_batch)
        received = self.queue[-1]
        if received is None:
            return all_decode_next
        verification = self.table.verification
        with torch.cuda.stream(self.broadcast_stream):
            message = self._empty_message(input_batch.num_reqs)
            self._broadcast(message)
            event = self.broadcast_stream.record_event()
            message.record_stream(self.main_stream)
        verified = verification.rows.copy() if input_batch.num_draft_tokens else None
        fields = {**vars(received), "event": event}
        self.queue[-1] = PendingTrees(**fields, message=message, verified=verified)
        return all_decode_next

    def get_prev_sampled_outputs(
        self, draft_tokens_to_update: Tensor | None = None
    ) -> dict[str, Tensor] | None:
        """As vLLM does, what was freed since being marked with -1; then take the trees."""
        pending = self.queue[0] if self.queue else None
        outputs: dict[str, Tensor] | None = super().get_prev_sampled_outputs(draft_tokens_to_update)
        if outputs is None:
            return None
        assert isinstance(pending, PendingTrees)
        self._take(pending, outputs["idx_mapping"], outputs["num_sampled"])
        return outputs

    def _take(self, pending: PendingTrees, slots: Tensor, num_sampled: Tensor) -> None:
        """Compact the accepted paths, put the trees into the table.

        Args:
            pending: received.
            slots: [R], of its requests; -1 for those that are left out.
            num_sampled: [R] int32.
        """
        is_left_out = slots < 0
        path, depths, ancestors, num_nodes = self._parts(pending.message)
        if pending.verified is not None:
            moved = num_sampled.masked_fill(is_left_out, 0)
            self.table.verification.compact_rows(pending.verified, path.contiguous(), moved)
        trees = self.table.trees
        # The last entry is nobody's.
        entries = slots.masked_fill(is_left_out, trees.num_nodes.shape[0] - 1).long()
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

    def _empty_message(self, requests: int) -> Tensor:
        return self.table.trees.depths.new_empty(requests, sum(self._widths))

    def _parts(self, message: Tensor) -> tuple[Tensor, ...]:
        return torch.split(message, self._widths, dim=1)

    @property
    def _widths(self) -> list[int]:
        trees = self.table.trees
        return [trees.depths.shape[1], trees.depths.shape[1], trees.ancestors[0].numel(), 1]

    def _broadcast(self, message: Tensor) -> None:
        torch.distributed.broadcast(message, src=self.last_rank, group=self.broadcast_group)
