# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of tokenizer and target: data made with one pair must not train for another."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.hub import from_hub
from vllm_redrafter.utils.json_files import read_object

ARCHITECTURE_FIELDS = str.split("""
architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers
num_attention_heads num_key_value_heads head_dim hidden_act rope_theta rope_scaling rope_parameters
sliding_window tie_word_embeddings
""")
"""Of config.json. Its other fields say how a model is loaded or used, or which version wrote it."""

NUM_PIECES = 64
PIECE_BYTES = 16 * 1024
"""1 MiB of a weights file, evenly spread, so that training any of its layers shows."""

WEIGHTS = ("*.safetensors", "*.bin")
"""Weights files, in order of preference: where there are safetensors, nothing else is looked at."""

OTHER_FORMAT = "consolidated*"
"""The same weights once more, in Mistral's own format, which transformers does not read."""

LENGTH = 16
"""Hexadecimal digits kept of a sha256: 64 bits, against mix-ups rather than forgery."""


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """What the ids of transformers' tokenizer mean: vocabulary, added and special tokens."""
    added = tokenizer.added_tokens_decoder.items()
    special = tokenizer.special_tokens_map.items()
    return digest(
        {
            "vocabulary": sorted(tokenizer.get_vocab().items()),
            "added": sorted((index, [token.content, token.special]) for index, token in added),
            "special": sorted((name, str(token)) for name, token in special),
        }
    )


def target_fingerprint(target: str | Path) -> str:
    """Which model this is: its architecture, and pieces of each of its weights files.

    The same files give the same fingerprint in any folder. Those of a hub id are fetched.
    ConfigError: no such model, or one without config.json or weights files.
    """
    name = str(target)
    folder = _local_folder(name)
    config = read_object(folder / "config.json")
    weights = {path.name: _pieces(path) for path in _weights_files(folder, name)}
    return digest({"architecture": _architecture(config), "weights": weights})


def digest(value: Any) -> str:
    """16 hexadecimal digits that stand for a value that JSON can express."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def _architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: config[name] for name in ARCHITECTURE_FIELDS if name in config}
    # Of a multimodal model, the language model is what drafts are made for.
    if isinstance(config.get("text_config"), dict):
        found["text_config"] = _architecture(config["text_config"])
    return found


def _local_folder(target: str) -> Path:
    path = Path(target).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    others = ["*/*", OTHER_FORMAT]
    with from_hub(target, "target"):
        for pattern in WEIGHTS:
            wanted = ["*.json", pattern]
            found = snapshot_download(target, allow_patterns=wanted, ignore_patterns=others)
            if any(Path(found).glob(pattern)):
                break
    return Path(found)


def _weights_files(folder: Path, target: str) -> Sequence[Path]:
    for pattern in WEIGHTS:
        found = (path for path in folder.glob(pattern) if not path.match(OTHER_FORMAT))
        if files := sorted(found):
            return files
    raise ConfigError(
        f"target {target!r}: no weights there; expected files named {' or '.join(WEIGHTS)}"
    )


def _pieces(path: Path) -> list[Any]:
    """A weights file's size, and the digest of pieces of it, which cover a small file."""
    size, last = path.stat().st_size, path.stat().st_size - PIECE_BYTES
    offsets = [last * piece // (NUM_PIECES - 1) for piece in range(NUM_PIECES)]
    if size <= NUM_PIECES * PIECE_BYTES:
        offsets = list(range(0, size, PIECE_BYTES))
    sha = hashlib.sha256()
    with path.open("rb") as file:
        for offset in offsets:
            file.seek(offset)
            sha.update(file.read(PIECE_BYTES))
    return [size, sha.hexdigest()]
