# SPDX-License-Identifier: Apache-2.0
"""The page as a browser shows it, and what the command refuses before it starts an engine."""

import json
import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from vllm_redrafter.cli.trace.run import answer_data, page, trace
from vllm_redrafter.drafting.recorder import RecordedNode, RecordedStep
from vllm_redrafter.utils.errors import ConfigError

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TEXTS = [b"</script><b id=broken>", b"&lt;", b"\xc3", b"\xa9", b"<!--<script>"]
ROOTS = [RecordedNode(token, 0, 0, None, 0, True, True) for token in (0, 2)]
CANDIDATES = [RecordedNode(4, 0, 1, None, 2), RecordedNode(3, 0, 1, 0.125, 0)]
STEPS = [
    RecordedStep([], [0], 0.1),
    RecordedStep([ROOTS[0], RecordedNode(1, 0, 1, 0.5, 0, True, True)], [1, 2], 0.2, 1.75),
    RecordedStep([ROOTS[1], *CANDIDATES], [3], 0.3, 1.5),
]


def decode(tokens: list[int]) -> str:
    return b"".join(TEXTS[token] for token in tokens).decode(errors="replace")


ANSWER = answer_data("a </script> prompt", [[0], [1, 2], [3]], STEPS, decode)
PAGE = page({"target": "<b id=target>"}, [STEPS[0], *STEPS], [ANSWER])
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
OPTIONS += [f"--disable-{what}" for what in ("background-networking", "component-update", "sync")]
DRIVER = """<script>
const bars = document.getElementById("timeline"), { left, width } = bars.getBoundingClientRect();
const click = new PointerEvent("pointerdown", { clientX: left + 0.9 * width });
for (const key of %s)
  if (key === "click") bars.dispatchEvent(click);
  else dispatchEvent(new KeyboardEvent("keydown", { key }));
</script></html>"""


def drawn(tmp_path: Path, keys: list[str]) -> str:
    """The document after some keys."""
    assert CHROMIUM is not None
    file = tmp_path / "page.html"
    file.write_text(PAGE.replace("</html>", DRIVER % json.dumps(keys)))
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [CHROMIUM, *OPTIONS, profile, "--dump-dom", file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_a_step_has_its_texts_its_time_and_its_nodes_up_to_the_answers_end() -> None:
    steps = ANSWER["steps"]
    texts = [(step["drafted"], step["own"], step["tokens"]) for step in steps]
    # A character is shown with the last of its bytes.
    assert texts == [("", "</script><b id=broken>", 1), ("&lt;", "", 2), ("", "é", 1)]
    assert answer_data("?", [[1]], STEPS[1:2], decode)["steps"] == [steps[1] | {"tokens": 1}]
    assert (steps[2]["expected_tokens"], steps[2]["seconds"]) == (1.5, 0.3)
    assert steps[2]["nodes"][1] == asdict(CANDIDATES[0]) | {"text": "<!--<script>"}


def test_the_data_cannot_end_its_script_and_nothing_is_asked_of_the_network() -> None:
    found = re.search(r'<script id="data"[^>]*>(.*?)</script>', PAGE, re.DOTALL)
    run = {"facts": {"target": "<b id=target>"}, "plain_seconds": [0.1, 0.2, 0.3]}
    assert found is not None and json.loads(found[1]) == run | {"answers": [ANSWER]}
    assert set(re.findall(r"https?://[^\"' ]+", PAGE)) <= {"http://www.w3.org/2000/svg"}


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize(
    ("keys", "step"),
    [([], 1), (["ArrowRight"], 2), (["End", "Home"], 0), (["click", "b"], 1), (["click"], 2)],
)
def test_it_opens_on_the_best_step_and_keys_and_bars_lead_to_another(
    keys: list[str], step: int, tmp_path: Path
) -> None:
    document = drawn(tmp_path, keys)
    assert f"Step {step + 1} of 3</output>" in document
    # The target's own token is a node: the candidate that it took unverified, or one more.
    assert len(re.findall(r'data-node="', document)) == [2, 3, 3][step]
    assert document.count('<g class="target') == 1
    assert ("It was a candidate too (13%), but not verified." in document) == (step == 2)
    assert "4 tokens in 3 steps, <strong>1.2 ×</strong>" in document
    assert "<b id=" not in document, "a token was read as markup"


@pytest.mark.parametrize(
    ("prompt", "page", "message"),
    [
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
        trace(str(tmp_path), None, [prompt], 8, tmp_path / page)
