# SPDX-License-Identifier: Apache-2.0
"""A draft head in one file: it ranks the tokens that may follow by the last token alone.

    python examples/bigram_head.py TARGET FOLDER

writes such a head for TARGET, untrained: its table is the target's output layer. vLLM's processes
find a head by an entry point, that is, one line in the pyproject.toml of the package it is in:

    [project.entry-points."vllm_redrafter.heads"]
    bigram = "bigram_head:BigramHead"
"""

import sys
from dataclasses import dataclass

from torch import nn
from transformers import AutoModelForCausalLM

from vllm_redrafter import DraftHead, HeadConfig, save_drafter


@dataclass(frozen=True)
class BigramConfig(HeadConfig):
    model_type = "bigram_drafter"


class BigramHead(DraftHead):
    config_class = BigramConfig

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Linear(config.hidden_size, config.num_ranked_tokens, bias=False)

    def condition(self, hidden):
        return self.fused(hidden)  # for heads that look at more than the last token

    def start(self, condition, embedded):
        return embedded

    def advance(self, state, embedded, depth):
        return embedded

    def features(self, condition, state):
        return state

    @property
    def vocabulary_layer(self):
        return self.table


if __name__ == "__main__":
    target = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    head = BigramHead(BigramConfig.of_target(target.config.vocab_size, target.config.hidden_size))
    head.table.weight = target.get_output_embeddings().weight
    save_drafter(head, sys.argv[2], verifier=sys.argv[1])
