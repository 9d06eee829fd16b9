"""What is recorded of a text: the same walks as those of the replay that `evaluate` does."""

from __future__ import annotations

import pytest
import torch
from replay_parts.simulation import best_nodes
from replay_parts.traces import Traces, record

from redrafter_testing.models.cycle_language import HIDDEN_SIZE, VOCAB_SIZE, CycleTarget, rows
from redrafter_testing.models.training_data import answered
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.rows import ListRows
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.training.batches import TextBatch
from vllm_redrafter.training.estimate import estimate_acceptance
from vllm_redrafter.training.target import read_target
from vllm_redrafter.tree.beam_search import beam_search
from vllm_redrafter.utils.errors import ConfigError


def drafter() -> RecurrentHead:
    torch.manual_seed(0)
    return RecurrentHead(RecurrentConfig(VOCAB_SIZE, HIDDEN_SIZE, exit_dim=16)).eval()


@pytest.fixture(scope="module")
def traces() -> Traces:
    return record(drafter(), CycleTarget(), rows(), [1, 3], 3)


@pytest.mark.parametrize(
    "config", [ReDrafterConfig(9, 3, 3), ReDrafterConfig(4, 3, 3), ReDrafterConfig(6, 3, 2)]
)
def test_walking_the_places_takes_the_steps_that_a_replay_takes(
    traces: Traces, config: ReDrafterConfig
) -> None:
    verified, accepted = best_nodes(traces, config)
    assert (verified == config.num_speculative_tokens).all()
    steps = tokens = place = 0
    left = traces.left.tolist()
    while place < len(left):
        output = min(int(accepted[place]) + 1, left[place])
        steps, tokens, place = steps + 1, tokens + output, place + output
    expected = estimate_acceptance(drafter(), CycleTarget(), rows(), config)
    assert (steps, tokens) == (expected.steps, expected.tokens)
    assert steps < tokens, "nothing was accepted"


def test_an_accepted_node_is_the_next_of_the_text_on_an_accepted_path(traces: Traces) -> None:
    """Against one place at a time, by the tokens of every node's path."""
    target, head = CycleTarget(), drafter()
    places = iter(range(len(traces.left)))
    # Places are those of the rows by length, which here are all as long.
    for row in rows():
        hidden = read_target(target, TextBatch.of([[row]])).hidden[0]
        first, last = int(row.generated.nonzero()[0]), len(row.tokens) - 1
        for root in range(first, last):
            place = next(places)
            found = beam_search(
                head,
                target.get_input_embeddings(),
                hidden[root - 1].unsqueeze(0),
                row.tokens[root].unsqueeze(0),
                3,
                3,
            )
            for level in range(3):
                for beam in range(3):
                    path, at = [], beam
                    for above in reversed(range(level + 1)):
                        path.append(int(found.tokens[0, above, at]))
                        at = int(found.back_pointers[0, above, at])
                    text = row.tokens[root + 1 : root + 2 + level].tolist()
                    is_accepted = bool(traces.by_width[3].accepted[place, level, beam])
                    assert is_accepted == (path[::-1] == text)
            assert traces.left[place] == last - root
    assert next(places, None) is None


def test_a_shorter_search_is_the_beginning_of_a_longer_one(traces: Traces) -> None:
    shorter = record(drafter(), CycleTarget(), rows(), [3], 2).by_width[3]
    cut = traces.by_width[3].at(torch.arange(len(traces.left)), 2)
    assert torch.equal(shorter.accepted, cut.accepted)
    assert torch.equal(shorter.back_pointers, cut.back_pointers)
    torch.testing.assert_close(shorter.log_probs, cut.log_probs)


def test_text_without_answers_is_refused() -> None:
    prompts = ListRows([answered([0, 1, 0, 2, 0, 3], [])])
    with pytest.raises(ConfigError, match="no answer of two tokens"):
        record(drafter(), CycleTarget(), prompts, [1], 2)
