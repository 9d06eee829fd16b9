# SPDX-License-Identifier: Apache-2.0
"""Speculators in each published form, made up and small; and what they say, one step at a time.

Names and configs as IBM's and ArcticTraining's programs write them: fms-extras'
`models/hf/modeling_mlp_speculators.py`, ArcticTraining's `projects/mlp_speculator` and
`projects/arctic_lstm_speculator`.
"""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

H, D, V = SIZES = 48, 32, 211
"""The target's hidden size, the speculator's width, the vocabulary."""
TARGET = "meta-llama/Llama-3.1-8B-Instruct"
Tensors = dict[str, Tensor]


def _drawn(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape, scale=1.0: scale * torch.randn(*shape, generator=generator)


def _norm(draw: Callable[..., Tensor], name: str, width: int) -> Tensors:
    weight, bias = 1 + draw(width, scale=0.2), draw(width, scale=0.2)
    return {f"{name}.weight": weight, f"{name}.bias": bias}


def _write(folder: Path, config: dict[str, Any], tensors: Tensors, safe: bool) -> None:
    """One tensor under several names: copies in safetensors, one storage in a pickle.

    Safetensors of more than five levels are in shards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    files = ["a.safetensors", "b.safetensors"] if config["n_predict"] > 5 else ["model.safetensors"]
    of = {name: files[number % len(files)] for number, name in enumerate(tensors)}
    if len(files) > 1:
        index = json.dumps({"weight_map": of})
        (folder / "model.safetensors.index.json").write_text(index)
    for file in files if safe else ():
        save_file({n: t.clone() for n, t in tensors.items() if of[n] == file}, folder / file)
    if not safe:
        torch.save(tensors, folder / "pytorch_model.bin")


def make_mlp(
    folder: Path,
    seed: int = 0,
    n: int = 4,
    tied: bool = False,
    nested: bool = False,
    all_names: bool = True,
    safe: bool = True,
    sizes: tuple[int, int, int] = SIZES,
    **entries: Any,
) -> Path:
    """IBM's form; `nested` is Arctic's `sum_rnn`."""
    draw, (hidden, inner, vocab) = _drawn(seed), sizes
    scale, dot = inner**-0.5, ".0" if nested else ""
    tensors: Tensors = {}
    for d in range(n):
        of_depth = {f"emb.{d}{dot}.weight": draw(vocab, inner, scale=scale)}
        of_depth |= {f"head.{d}.weight": draw(vocab, inner, scale=1.0 if nested else scale)}
        of_depth |= _norm(draw, f"ln.{d}{dot}", inner)
        of_depth[f"proj.{d}{dot}.weight"] = draw(inner, inner if d else hidden, scale=scale)
        for name, tensor in of_depth.items():
            first = name.replace(f".{d}", f".{min(d, int(name.startswith('proj')))}", 1)
            if all_names or not tied or first == name:
                tensors[name] = tensors.get(first, tensor) if tied else tensor
    config = {"model_type": "mlp_speculator", "n_predict": n, "vocab_size": vocab}
    config |= {"tie_weights": tied, "torch_dtype": "float32"}
    if nested:
        config |= _arctic("sum_rnn", inner, hidden)
    else:
        tensors = {f"speculator.{name}": tensor for name, tensor in tensors.items()}
        config |= {"emb_dim": hidden, "inner_dim": inner, "n_candidates": 5}
        config["architectures"] = ["MLPSpeculatorPreTrainedModel"]
    _write(folder, config | entries, tensors, safe)
    return folder


def _arctic(method: str, width: int, hidden: int) -> dict[str, Any]:
    widths = dict.fromkeys(("inner_dim", "proj_dim", "emb_dim"), str(width))
    return {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
        "base_model_name_or_path": TARGET,
        "input_hidden_dim": hidden,
        "method": method,
        "scale_input": True,
        **widths,
    }


def make_lstm(
    folder: Path,
    seed: int = 0,
    n: int = 3,
    all_names: bool = True,
    one_table: bool = True,
    safe: bool = False,
    sizes: tuple[int, int, int] = SIZES,
    **entries: Any,
) -> Path:
    """Arctic's `sum_lstm`."""
    draw, (hidden, width, vocab) = _drawn(seed), sizes
    scale = width**-0.5
    table, head = draw(vocab, width, scale=scale), draw(vocab, width)
    tensors = {"forget_emb.0.weight": table, "head.0.weight": head}
    for gate in ("forget", "input", "cell", "output"):
        if all_names or gate == "forget":
            of_gate = table if one_table or gate == "forget" else draw(vocab, width, scale=scale)
            tensors[f"{gate}_emb.0.weight"] = of_gate
        tensors[f"{gate}_proj.0.weight"] = draw(width, hidden, scale=scale)
        tensors[f"{gate}_proj.1.weight"] = draw(width, width, scale=scale)
    tensors |= _norm(draw, "cell_ln.0", width) | _norm(draw, "state_ln.0", width)
    if all_names:
        tensors |= {f"head.{d}.weight": head for d in range(n)}
    config = {"model_type": "mlp_speculator", "n_predict": n, "vocab_size": vocab}
    config |= {"tie_weights": True, "tie_lstm_embs": one_table}
    _write(folder, config | _arctic("sum_lstm", width, hidden) | entries, tensors, safe)
    return folder


_SCALED_TIED = {"tied": True, "scale_input": True}
KINDS: dict[str, Callable[[Path], Path]] = {
    "ibm": partial(make_mlp, seed=1),
    "as wide as the target": partial(make_mlp, seed=2, n=3, sizes=(H, H, V), inner_dim=0),
    "ibm, tied": partial(make_mlp, seed=3, n=5, **_SCALED_TIED),
    "ibm, tied, first names": partial(make_mlp, seed=3, n=5, all_names=False, **_SCALED_TIED),
    "six levels": partial(make_mlp, seed=4, n=6, scale_input=True),
    "arctic's mlp": partial(
        make_mlp, seed=5, n=3, safe=False, architectures="MLPSpeculatorPreTrainedModel",
        base_model_name_or_path=TARGET, top_k_tokesns_per_head=[1, 1, 1], **_SCALED_TIED
    ),
    "lstm": partial(make_lstm, seed=6),
    "lstm, first names": partial(make_lstm, seed=6, all_names=False, safe=True),
    "sum_rnn": partial(make_mlp, seed=8, n=3, nested=True, safe=False),
    "sum_rnn, tied": partial(make_mlp, seed=9, n=3, tied=True, nested=True, safe=False),
}  # fmt: skip
"""Those that are read. Another two are refused."""


def reference_logits(folder: Path, hidden: Tensor, path: Sequence[int]) -> Tensor:
    """[len(path), V], after each token of a path that begins with the root.

    `hidden` [H] is the target's state that predicted the root. Formulas are those of
    `vllm_redrafter/heads/speculators.py`.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors: Tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    if not tensors:
        tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    t = {name.removeprefix("speculator."): tensor for name, tensor in tensors.items()}
    dot = ".0" if "proj.0.0.weight" in t else ""
    r = config["n_predict"]
    s = _rms(hidden) / math.sqrt(2) if config.get("scale_input") else hidden
    c = torch.zeros(())
    logits = []
    for depth, token in enumerate(path):
        d, at = (0, min(depth, 1)) if config["tie_weights"] else (depth, depth)
        if config.get("method") == "sum_lstm":
            z = t["forget_emb.0.weight"][token]
            f, i, o, g = (
                t[f"{gate}_proj.{at}.weight"] @ s + _alpha(r, len(z)) * z
                for gate in ("forget", "input", "output", "cell")
            )
            new = _gelu(_rms(g) * t["cell_ln.0.weight"] + t["cell_ln.0.bias"])
            c = f.sigmoid() * c + i.sigmoid() * new
            s = o.sigmoid() * _gelu(_rms(c) * t["state_ln.0.weight"] + t["state_ln.0.bias"])
        else:
            z = t[f"emb.{d}{dot}.weight"][token]
            u = _rms(t[f"proj.{at}{dot}.weight"] @ s + _alpha(r, len(z)) * z)
            s = _gelu(u * t[f"ln.{d}{dot}.weight"] + t[f"ln.{d}{dot}.bias"])
        logits.append(t[f"head.{d}.weight"] @ s)
    return torch.stack(logits)


def _rms(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + 1e-6)


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def _alpha(r: int, width: int) -> float:
    w = 0.5 ** (0.5 / r)
    return math.sqrt((1 - w * w) * width / 2) / w


def reference_beams(
    folder: Path, hidden: Tensor, root: int, width: int, length: int
) -> list[list[tuple[tuple[int, ...], float]]]:
    """By level, the W best continuations by one of the 50 best tokens, with log-probabilities."""
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    levels = []
    for _ in range(length):
        grown = []
        for path, log_prob in beams:
            best = reference_logits(folder, hidden, [root, *path])[-1].topk(50)
            scores = (best.values.log_softmax(-1) + log_prob).tolist()
            tokens = best.indices.tolist()
            grown += [((*path, t), score) for t, score in zip(tokens, scores, strict=True)]
        beams = sorted(grown, key=lambda beam: -beam[1])[:width]
        levels.append(beams)
    return levels
