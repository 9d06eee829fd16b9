#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail

usage() {
    cat <<'EOF_USAGE'
The first run on a GPU, in one command: does everything work there, and how fast is it?

    benchmarks/first_gpu_run.sh OUT
    benchmarks/first_gpu_run.sh OUT --seconds 560 -- --model TARGET --drafter DRAFTER

Steps run one after the other, the most important first. Each has a time limit, and none that fails
keeps the next from running. Each leaves in the folder OUT

    NAME.log      what it printed
    NAME.json     its figures, as far as it came (of tests: NAME.xml)
    NAME.state    how it ended, how long it took, at which commit, and its command

and after each of them summary.md is written anew. Called again with the same OUT, it goes on where
it was: what has ended, well or not, is left alone, and a step that was interrupted is repeated.

    --seconds N   start no step whose limit is not over N seconds from now (default 1500). Later
                  steps that fit in still run; call it again for those that did not
    --retry       repeat what failed and what ran out of time, too
    --only NAMES  of the steps only these, separated by commas; the others stay as they are
    -- ARGUMENTS  of throughput.py. The logs of steps take target and drafter from them; all of
                  these are left out without

PYTHON is the interpreter (default: .venv/bin/python beside benchmarks/, if there is one, else
python3). The package, vLLM for CUDA, pytest and pytest-xdist have to be installed in it.

Exit status: 0 if all steps are done; 1 if one failed, ran out of time or has not been run; 2 if
nothing can be run here.
EOF_USAGE
}

refuse() {
    printf 'first_gpu_run.sh: %s\n' "$*" >&2
    exit 2
}

caller=$PWD
benchmarks=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(dirname "$benchmarks")
grace=15 # seconds that a step gets to end by itself when its time is over

out='' seconds=1500 retry='' only='' throughput=()
while (($#)); do
    case $1 in
        -h | --help)
            usage
            exit
            ;;
        --seconds)
            [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || refuse "--seconds '${2:-}': expected a number of seconds"
            seconds=$2
            shift
            ;;
        --retry) retry=yes ;;
        --only)
            [[ ${2:-} =~ ^[a-z0-9_]+(,[a-z0-9_]+)*$ ]] ||
                refuse "--only '${2:-}': expected names of steps, separated by commas"
            only=$2
            shift
            ;;
        --)
            throughput=("${@:2}")
            break
            ;;
        -*) refuse "unknown option $1 (--help says which there are; throughput.py's come after --)" ;;
        *)
            [[ ! $out ]] || refuse "one OUT is expected, found $out and $1"
            out=$1
            ;;
    esac
    shift
done
[[ $out ]] || refuse "OUT is missing: the folder for logs and figures (--help says more)"
mkdir -p "$out" || refuse "OUT: $out cannot be made"
out=$(cd "$out" && pwd)

python=${PYTHON:-}
if [[ ! $python ]]; then
    python=python3
    [[ ! -x $repo/.venv/bin/python ]] || python=$repo/.venv/bin/python
fi
# Python's -m looks in the working directory: here it finds first_gpu_parts. Not the repository's
# root, where it would also find `triton_kernels`, which vLLM takes for a package of that name.
cd "$benchmarks"
export PYTHONUNBUFFERED=1 # a step that is ended leaves a whole log
asked='import torch; torch.cuda.get_device_capability()'
"$python" -c "$asked" || refuse "torch finds no GPU here ($python); see above"
commit=$(git -C "$repo" describe --always --dirty --abbrev=12 --exclude '*' 2>/dev/null) || commit=unknown

names=() limits=() commands=()

# step NAME SECONDS COMMAND...
step() {
    names+=("$1")
    limits+=("$2")
    commands+=("$(printf '%q ' "${@:3}")")
}

part() { step "$1" "$2" "$python" -m "first_gpu_parts.$1" --output "$out/$1.json" "${@:3}"; }

# -P: without the working directory on the path, which `python -m pytest` would add.
tests() { step "$1" "$2" "$python" -P -m pytest --tb short --junitxml "$out/$1.xml" "${@:3}"; }

benchmark() { step "$1" "$2" "$python" "$3" --output "$out/$1.json" "${@:4}"; }

# logged NAME SECONDS ARGUMENTS: of step_log.py, which also prints what is compiled in service.
logged() {
    step "$1" "$2" env --chdir "$caller" TORCH_LOGS=recompiles "$python" "$benchmarks/step_log.py" \
        --model "$model" --output "$out/$1.json" "${@:3}"
}

model='' drafter=''
for index in "${!throughput[@]}"; do
    case ${throughput[index]} in
        --model) model=${throughput[index + 1]:-} ;;
        --drafter) drafter=${throughput[index + 1]:-} ;;
    esac
done
[[ ! ${throughput[*]} || ($model && $drafter) ]] ||
    refuse "throughput.py's arguments, after --, need --model TARGET and --drafter DRAFTER"

part environment 60
# With torch's sync debug mode.
tests no_waiting 90 "$repo/tests/engine/v2/test_draft_search.py" -n 0 -k does_not_wait
# The real FlashAttention, against attention in float64.
tests flash_attention 60 "$repo/tests/engine/v2/test_flash_attention.py" -n 0
part parity 300
if [[ $model ]]; then
    logged steps_ours 240 --drafter "$drafter"
    logged steps_plain 180
    logged steps_plain_full 180 \
        --engine-args '{"compilation_config": {"cudagraph_mode": "FULL"}}'
fi
benchmark kernels 200 kernels.py --rows 4 64 --repeats 20
if [[ $model ]]; then
    logged steps_top_p 180 --drafter "$drafter" --requests 64 --temperature 0.6 --top-p 0.9
    # Where it was called from, for the sake of relative paths. The first options are defaults.
    step throughput 300 env --chdir "$caller" "$python" "$benchmarks/throughput.py" \
        --repeats 1 --max-tokens 96 --min-tokens 48 --ignore-eos "${throughput[@]}" \
        --output "$out/throughput.json"
fi
# Processes, as most of the time goes into compiling kernels. What compiles for other GPUs needs none.
tests kernel_tests 300 "$repo/tests/triton_kernels" -n auto --maxprocesses 8 --maxfail 50 \
    --ignore "$repo/tests/triton_kernels/test_compilation.py"
step prefill_parity 200 "$python" -m first_gpu_parts.parity --half --output "$out/prefill_parity.json"

for name in ${only//,/ }; do
    [[ " ${names[*]} " == *" $name "* ]] || refuse "--only $name: the steps are ${names[*]}"
done

child=''
trap '[[ ! $child ]] || kill "$child" 2>/dev/null || true; exit 130' INT TERM

# Run the step of this index, and write down how it ended.
run() {
    local name=${names[$1]} limit=${limits[$1]} command=${commands[$1]}
    local began=$SECONDS code=0 status=failed taken
    printf '%s (at most %d s) ... ' "$name" "$limit"
    rm -rf "${out:?}/$name" "$out/$name".{json,xml,state}
    # In the background, as only `wait` is interrupted by a signal. `timeout` ends the whole group
    # of processes, engines included.
    timeout --kill-after="$grace" "$limit" bash -c "exec $command" </dev/null >"$out/$name.log" 2>&1 &
    child=$!
    wait "$child" || code=$?
    child=''
    taken=$((SECONDS - began))
    # 137: killed, by the limit or for want of memory.
    if ((code == 0)); then
        status=done
    elif ((code == 124 || (code == 137 && taken >= limit))); then
        status='timed out'
    fi
    printf '%s: %s\n' status "$status" exit "$code" seconds "$taken" limit "$limit" \
        commit "$commit" ended "$(date -u +%FT%TZ)" command "$command" >"$out/$name.state"
    printf '%s, %d s\n' "$status" "$taken"
}

is_meant() { [[ ! $only || ,$only, == *,"$1",* ]]; }
has_ended() { [[ -e $out/$1.state ]]; }
is_done() { grep -qx 'status: done' "$out/$1.state" 2>/dev/null; }

# of NAME KEY: what NAME.state says.
of() { sed -n "s/^$2: //p" "$out/$1.state" 2>/dev/null || true; }

ended() {
    local status
    status=$(of "$1" status)
    if [[ $status ]]; then
        echo "$status"
    elif [[ -e $out/$1.log ]]; then
        echo interrupted
    else
        echo 'not run'
    fi
}

# How every step ended, and the end of what it printed: tables and failed tests come last.
summarise() {
    local name
    {
        printf '# First run on a GPU\n\n| step | how it ended | seconds | limit | commit |\n'
        printf '| --- | --- | --- | --- | --- |\n'
        for name in "${names[@]}"; do
            printf '| %s | %s | %s | %s | %s |\n' "$name" "$(ended "$name")" \
                "$(of "$name" seconds)" "$(of "$name" limit)" "$(of "$name" commit)"
        done
        for name in "${names[@]}"; do
            [[ ! -e $out/$name.log ]] ||
                printf '\n## %s (%s)\n\n````\n%s\n````\n' "$name" "$(ended "$name")" \
                    "$(tail -n 60 "$out/$name.log")"
        done
    } >"$out/summary.md.new"
    mv "$out/summary.md.new" "$out/summary.md"
}

for index in "${!names[@]}"; do
    name=${names[index]}
    is_meant "$name" || continue
    if is_done "$name" || { has_ended "$name" && [[ ! $retry ]]; }; then
        continue
    elif ((SECONDS + limits[index] + grace > seconds)); then
        printf '%s: no time left for it in this call\n' "$name"
    else
        run "$index"
        summarise
    fi
done
summarise
[[ $model ]] || echo 'throughput.py and step_log.py are left out: arguments are expected after --'
printf 'Written to %s\n' "$out/summary.md"
for name in "${names[@]}"; do
    is_done "$name" || exit 1
done
