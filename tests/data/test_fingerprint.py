# SPDX-License-Identifier: Apache-2.0
"""Fingerprints: the same for the same thing elsewhere, another for everything else."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from redrafter_testing.models.tiny_models import add_tokenizer
from vllm_redrafter.data import fingerprint
from vllm_redrafter.data.fingerprint import target_fingerprint, tokenizer_fingerprint
from vllm_redrafter.utils.errors import ConfigError


@pytest.fixture
def copy(target: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(target, tmp_path / "copy"))


def test_a_tokenizer_is_known_wherever_it_lies(target: Path, copy: Path) -> None:
    tokenizer, other = (AutoTokenizer.from_pretrained(folder) for folder in (target, copy))
    other.chat_template = "{{ messages }}"
    other("used", truncation=True, max_length=3)
    other.save_pretrained(copy / "again")
    for same in (other, AutoTokenizer.from_pretrained(copy / "again")):
        assert tokenizer_fingerprint(same) == tokenizer_fingerprint(tokenizer)


def test_vocabulary_added_and_special_tokens_all_count(target: Path, tmp_path: Path) -> None:
    add_tokenizer(tmp_path, vocab_size=300)
    same, added, special, role = (AutoTokenizer.from_pretrained(target) for _ in range(4))
    added.add_tokens(["<plain>"])
    special.add_tokens(["<plain>"], special_tokens=True)
    role.pad_token = role.eos_token
    tokenizers = (same, added, special, role, AutoTokenizer.from_pretrained(tmp_path))
    assert len(set(map(tokenizer_fingerprint, tokenizers))) == 5


def test_a_target_is_known_wherever_it_lies_and_whichever_version_wrote_its_config(
    target: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy / "config.json"
    config = json.loads(path.read_text()) | {"transformers_version": "9.9", "use_cache": False}
    path.write_text(json.dumps(dict(reversed(config.items()))))
    assert target_fingerprint(copy) == target_fingerprint(str(target))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(copy))
    monkeypatch.setattr("huggingface_hub.model_info", lambda *args, **kwargs: None)
    assert target_fingerprint("someone/target") == target_fingerprint(target)


@pytest.mark.parametrize("piece", [512, 64 * 1024])
def test_architecture_and_weights_count(
    piece: int, copy: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where pieces are read of a file that is large, and where all of a small one is."""
    monkeypatch.setattr(fingerprint, "PIECE_BYTES", piece)
    weights, config = copy / "model.safetensors", copy / "config.json"
    whole = weights.read_bytes()
    assert (len(whole) > fingerprint.NUM_PIECES * piece) == (piece == 512)
    third = len(whole) // 3
    other = json.loads(config.read_text()) | {"num_attention_heads": 8}
    for path, content in (
        (weights, whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]),
        (weights, whole[:-1] + bytes([whole[-1] ^ 1])),
        (weights, bytes(byte ^ 1 for byte in whole[:third]) + whole[third:]),
        (weights, whole + b"0"),
        (config, json.dumps(other).encode()),
    ):
        before = path.read_bytes()
        path.write_bytes(content)
        assert target_fingerprint(copy) != target_fingerprint(target)
        path.write_bytes(before)
    assert target_fingerprint(copy) == target_fingerprint(target)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: not readable as JSON"):
        target_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "consolidated.safetensors").touch()
    with pytest.raises(ConfigError, match=r"no weights there; expected .*safetensors or \*\.bin"):
        target_fingerprint(tmp_path)
