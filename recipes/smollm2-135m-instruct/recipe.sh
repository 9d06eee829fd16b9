#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the drafter for SmolLM2-135M-Instruct that vllm-redrafter ships, with its own commands alone.
#
#     recipe.sh FOLDER
#
# FOLDER must hold the target as FOLDER/target (`vllm-redrafter demo` caches it; or a hub's copy);
# prompts, answers and the drafter go there too. Stopped while it makes prompts or answers, it is
# continued by the same command; stopped in training, add --resume to `train`.
set -euo pipefail
cd "$1"

vllm-redrafter make-prompts target --num-prompts 6000 --temperature 0.9 --seed 1 \
    --in-flight 128 --max-model-len 512 --output prompts.jsonl

# A third of the answers is sampled: a drafter of greedy text alone guesses worse when sampling.
# Parts can be answered at the same time, by several machines, or by cores that are given to each.
head -n 2000 prompts.jsonl > sampled-prompts.jsonl
sed -n 2001,4700p prompts.jsonl > greedy-prompts.jsonl
sed -n 4701,6000p prompts.jsonl > greedy-prompts-2.jsonl
answer="vllm-redrafter generate-data target --max-tokens 192 --in-flight 128 --max-model-len 768"
$answer --prompts sampled-prompts.jsonl --output sampled --temperature 0.7 --seed 2
$answer --prompts greedy-prompts.jsonl --output greedy --temperature 0
$answer --prompts greedy-prompts-2.jsonl --output greedy-2 --temperature 0

# What the target makes of its answers is kept, 6.2 GB: its layers are run once, not at every epoch.
capture="vllm-redrafter capture target --max-length 288"
for part in sampled greedy greedy-2; do
    $capture --data $part --output states/$part
done

vllm-redrafter train target --data sampled --data greedy --data greedy-2 --output drafter \
    --hidden-states states/sampled --hidden-states states/greedy --hidden-states states/greedy-2 \
    --draft-vocab-size 8192 --unroll-steps 4 --precision bf16 \
    --epochs 2 --batch-size 8 --micro-batch-size 8 --block-length 288 \
    --learning-rate 2e-3 --warmup-steps 30 --held-out 48 --evaluate-every 325 --save-every 325

# The rest of the drafter stays as it is; so few steps are enough.
vllm-redrafter train target --add-selector drafter --data sampled --data greedy --data greedy-2 \
    --hidden-states states/sampled --hidden-states states/greedy --hidden-states states/greedy-2 \
    --output with-selector --unroll-steps 4 --precision bf16 \
    --max-steps 546 --batch-size 2 --micro-batch-size 2 --block-length 288 \
    --learning-rate 2e-3 --warmup-steps 30 --held-out 24 --evaluate-every 2000 --save-every 2000

# The target's own name, in place of the folder's.
vllm-redrafter convert with-selector shipped --target HuggingFaceTB/SmolLM2-135M-Instruct
