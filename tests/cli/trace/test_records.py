# SPDX-License-Identifier: Apache-2.0
"""From recorded steps to what the page shows."""

from vllm_redrafter.cli.trace.records import page_records
from vllm_redrafter.drafting.recorder import RecordedNode, RecordedStep

NODES = [
    RecordedNode(1, 0, 0, None, 0, verified=True, accepted=True),
    RecordedNode(2, 0, 1, 0.123456, 0, verified=True, accepted=True),
    RecordedNode(3, 0, 1, None, 4),
]
STEPS = [RecordedStep([], [1], 0.5), RecordedStep(NODES, [2, 4], 0.25), RecordedStep([], [5], 1.0)]


def decode(tokens: list[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def test_the_text_grows_by_what_a_step_gave() -> None:
    steps = page_records("?", [1, 2, 4, 5], STEPS, decode)["steps"]
    assert [step["before"] for step in steps] == ["", "<1>", "<1><2><4>"]
    assert [step["text"] for step in steps] == ["<1>", "<1><2><4>", "<1><2><4><5>"]
    assert [step["tokens"] for step in steps] == [1, 2, 1]
    assert [step["milliseconds"] for step in steps] == [500.0, 250.0, 1000.0]


def test_tokens_behind_the_answers_end_are_left_out() -> None:
    steps = page_records("?", [1, 2], STEPS, decode)["steps"]
    assert [step["text"] for step in steps] == ["<1>", "<1><2>"]


def test_a_node_says_its_text_its_sources_and_its_fate() -> None:
    nodes = page_records("?", [1, 2, 4, 5], STEPS, decode)["steps"][1]["nodes"]
    assert nodes[1] == {
        "text": "<2>",
        "parent": 0,
        "depth": 1,
        "probability": 0.1235,
        "match": 0,
        "verified": True,
        "accepted": True,
    }
    assert nodes[2]["probability"] is None and nodes[2]["match"] == 4
    assert not nodes[2]["verified"] and not nodes[2]["accepted"]
