#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A drafter for an instruct model of 8B parameters, on one GPU of 80 GB:
#
#     recipes/8b-on-one-gpu/recipe.sh meta-llama/Llama-3.1-8B-Instruct work
#     recipes/8b-on-one-gpu/recipe.sh Qwen/Qwen3-8B work 60000      # so many prompts
#
# Stopped while it makes prompts or answers, it is continued by the same command. Stopped later: run
# the commands from the one that stopped on, with --resume if it has written a checkpoint.
set -euo pipefail
target=$1
num=${3:-60000}
if [ -d "$target" ]; then target=$(realpath "$target"); fi
mkdir -p "$2"
cd "$2"

vllm-redrafter make-prompts "$target" --num-prompts "$num" --temperature 0.9 --max-model-len 4096 \
    --output prompts.jsonl

# A third of the answers is sampled: a drafter of greedy text alone guesses worse when sampling.
head -n $((num / 3)) prompts.jsonl > sampled-prompts.jsonl
tail -n +$((num / 3 + 1)) prompts.jsonl > greedy-prompts.jsonl
vllm-redrafter generate-data "$target" --prompts sampled-prompts.jsonl --output sampled \
    --max-tokens 1024 --max-model-len 4096 --temperature 0.7 --seed 2
vllm-redrafter generate-data "$target" --prompts greedy-prompts.jsonl --output greedy \
    --max-tokens 1024 --max-model-len 4096 --temperature 0

# The target runs beside the drafter, twice. Its states would take a terabyte of disk instead.
vllm-redrafter train "$target" --data sampled --data greedy --output drafter \
    --draft-vocab-size 32000 --precision bf16 --target-dtype bfloat16 \
    --epochs 2 --batch-size 16 --micro-batch-size 2 \
    --held-out $((num / 240)) --evaluate-every 450 --save-every 450

# What makes drafts cheaper; the rest of the drafter stays as it is, so few steps are enough.
vllm-redrafter train "$target" --add-selector drafter --data sampled --data greedy \
    --output with-selector --precision bf16 --target-dtype bfloat16 \
    --max-steps 500 --batch-size 4 --micro-batch-size 2 --held-out $((num / 240))

vllm-redrafter evaluate "$target" with-selector --data sampled --data greedy \
    --held-out $((num / 240)) --target-dtype bfloat16 --record \
    --beam-widths 4 --beam-lengths 3,4,5 --spec-tokens 8,12,16
