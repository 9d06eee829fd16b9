# SPDX-License-Identifier: Apache-2.0
"""The page as a browser shows it, and what the command refuses before it starts an engine."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_redrafter.cli.trace.run import page, page_records, trace
from vllm_redrafter.drafting.recorder import RecordedNode, RecordedStep
from vllm_redrafter.utils.errors import ConfigError

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TEXTS = ["</script><b id=broken>", "&lt;", "two", "three", "<!--<script>"]
TREES = [
    [RecordedNode(0, 0, 0, None, 0, True, True), RecordedNode(1, 0, 1, 0.5, 0, True, True)],
    [RecordedNode(2, 0, 0, None, 0, True, True), RecordedNode(4, 0, 1, None, 2)],
]
STEPS = [
    RecordedStep([], [0], 0.1),
    RecordedStep(TREES[0], [1, 2], 0.2),
    RecordedStep(TREES[1], [3], 0.3),
]


def decode(tokens: list[int]) -> str:
    return "".join(TEXTS[token] for token in tokens)


RECORDS = page_records("a </script> prompt", [0, 1, 2, 3], STEPS, decode)
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
OPTIONS += [f"--disable-{what}" for what in ("background-networking", "component-update", "sync")]
DRIVER = """<script>
for (const key of %s) dispatchEvent(new KeyboardEvent("keydown", { key }));
</script></html>"""


def drawn(tmp_path: Path, keys: list[str]) -> str:
    """The document after some keys."""
    assert CHROMIUM is not None
    file = tmp_path / "page.html"
    file.write_text(page(RECORDS).replace("</html>", DRIVER % json.dumps(keys)))
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [CHROMIUM, *OPTIONS, profile, "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def test_the_text_grows_by_what_a_step_gave_up_to_the_answers_end() -> None:
    steps = page_records("?", [0, 1, 2], STEPS, decode)["steps"]
    assert [step["text"] for step in steps] == [TEXTS[0], "".join(TEXTS[:3])]
    assert [step["before"] for step in steps] == ["", TEXTS[0]]
    assert [step["tokens"] for step in steps] == [1, 2]
    assert [step["milliseconds"] for step in steps] == [100.0, 200.0]


def test_a_node_says_its_text_its_sources_and_its_fate() -> None:
    nodes = [node for step in RECORDS["steps"] for node in step["nodes"]]
    common = {"parent": 0, "depth": 1, "verified": True, "accepted": True}
    assert nodes[1] == common | {"text": "&lt;", "probability": 0.5, "match": 0}
    common |= {"verified": False, "accepted": False}
    assert nodes[3] == common | {"text": "<!--<script>", "probability": None, "match": 2}


def test_the_data_cannot_end_its_script_and_nothing_is_asked_of_the_network() -> None:
    found = re.search(r'<script id="data"[^>]*>(.*?)</script>', page(RECORDS), re.DOTALL)
    assert found is not None and json.loads(found[1]) == RECORDS
    links = re.findall(r"https?://[^\"' ]+", page(RECORDS))
    assert set(links) <= {"http://www.w3.org/2000/svg"}  # a namespace


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize(
    ("keys", "step"), [(["ArrowRight"], 1), (["End", "Home"], 0), (["Home", "End"], 2)]
)
def test_keys_move_to_a_step_and_its_nodes_are_drawn(
    keys: list[str], step: int, tmp_path: Path
) -> None:
    document = drawn(tmp_path, keys)
    assert f">{step + 1} / 3</output>" in document
    assert len(re.findall(r'data-node="', document)) == len(RECORDS["steps"][step]["nodes"])
    assert len(re.findall(r"<g class=\"[^\"]*unverified", document)) == (step == 2)
    assert "<b id=" not in document, "a token was read as markup"


@pytest.mark.parametrize(
    ("prompt", "page", "message"),
    [
        ("Hello", "missing/a.html", r"missing/a\.html' cannot be written: No such file"),
        ("Hello", ".", "cannot be written: Is a directory"),
        ("Hello", "/proc/a.html", r"--html '/proc/a\.html' cannot be written"),
        (" ", "a.html", "--prompt ' '"),
        ("Hello", "a.html", r"^target .*: transformers cannot read its tokenizer"),
    ],
)
def test_what_cannot_be_traced_is_refused_before_an_engine_starts(
    prompt: str, page: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        trace(str(tmp_path), None, prompt, 8, tmp_path / page)
