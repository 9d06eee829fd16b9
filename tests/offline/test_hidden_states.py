# SPDX-License-Identifier: Apache-2.0
"""`capture` through real vLLM, and training on what it wrote."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from redrafter_testing.models.families.without_trees import CHAINS_ALONE
from redrafter_testing.models.small_trainings import run
from redrafter_testing.models.tiny_models import MAX_LENGTH
from redrafter_testing.models.transformers_states import write_states_of
from redrafter_testing.own_commands import printed_by
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.dataset import DatasetInfo, Row, read_dataset, write_shard
from vllm_redrafter.data.fingerprint import target_fingerprint, tokenizer_fingerprint
from vllm_redrafter.data.hidden_states import StoredStates
from vllm_redrafter.data.rows import row_lengths
from vllm_redrafter.data.settings import CaptureSettings, EngineSettings
from vllm_redrafter.offline.hidden_states import HiddenStatesEngine
from vllm_redrafter.training.plan import TrainingJob
from vllm_redrafter.training.training_config import TrainingConfig
from vllm_redrafter.utils.errors import ConfigError

pytestmark = pytest.mark.engine

VOCAB = 512
LENGTHS = (40, MAX_LENGTH, 2, 129, 1, 128, 33, 64, 127, 65)
"""From a row that is not read at all to one that is as long as the target allows; around vLLM's
block size, and more of them than the engine works on at once."""


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    of_target, num = target_fingerprint(target), len(LENGTHS)
    of_tokenizer = tokenizer_fingerprint(AutoTokenizer.from_pretrained(target))
    DatasetInfo("t", of_target, of_tokenizer, None, "random", num, num, VOCAB).save(folder)
    random = np.random.default_rng(0)
    rows = [
        Row(index, random.integers(2, VOCAB, length).tolist(), [i > 4 for i in range(length)])
        for index, length in enumerate(LENGTHS)
    ]
    write_shard(folder, 0, rows)
    return folder


@pytest.fixture(scope="module")
def captured(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    command = ["capture", str(target), f"--data={data}", f"--output={folder}"]
    command += ["--dtype=float32", "--in-flight=4", '--engine-args={"enforce_eager": true}']
    assert "10 rows" in printed_by(*command)
    visible = {path.name for path in folder.iterdir() if path.suffix != ".lock"}
    assert visible == {"states.json", "states-00000.safetensors"}, "vLLM's own files are gone"
    return folder


def test_states_are_those_of_transformers(
    target: Path, data: Path, captured: Path, tmp_path: Path
) -> None:
    lengths = row_lengths(read_dataset(data)[1])
    computed = write_states_of(tmp_path / "computed", target, data)
    found, expected = StoredStates(captured, lengths), StoredStates(computed, lengths)
    for row in range(len(LENGTHS)):
        # Without a norm the layers' numbers are some ten times as large.
        torch.testing.assert_close(found[row], expected[row], rtol=1e-3, atol=1e-3)


def test_training_on_them_is_training_with_the_target(
    target: Path, data: Path, captured: Path, tmp_path: Path
) -> None:
    config = TrainingConfig(max_steps=3, batch_size=2, block_length=512, held_out=1, warmup_steps=1)
    asked = TrainingJob(str(target), (data,), tmp_path / "computed", config, ReDrafterConfig(6, 2))
    computed, _ = run(asked)
    found, _ = run(replace(asked, output=tmp_path / "captured", hidden_states=(captured,)))
    assert found.losses == pytest.approx(computed.losses, rel=1e-4) and len(found.losses) == 3


def test_a_target_whose_class_hands_out_no_states_is_refused(tmp_path: Path) -> None:
    (family,) = (f for f in CHAINS_ALONE if f.architecture == "JambaForCausalLM")
    target = family.make(tmp_path / "target")
    with pytest.raises(
        ConfigError, match=r"^capture: .*is no SupportsEagle3\); train without --hid"
    ):
        HiddenStatesEngine(str(target), CaptureSettings(), [2], 10, tmp_path)


def test_what_capture_decides_is_not_taken_from_engine_args(tmp_path: Path) -> None:
    further = EngineSettings(engine_args='{"enable_prefix_caching": true, "seed": 1}')
    with pytest.raises(ConfigError, match=r"args: enable_prefix_caching: the command decides"):
        HiddenStatesEngine("no-target", CaptureSettings(engine=further), [2], 10, tmp_path)
