# SPDX-License-Identifier: Apache-2.0
"""Try a tree policy of your own, without vLLM: which explored nodes should the target verify?

    python examples/own_tree_policy.py TARGET DRAFTER "First prompt" "Second prompt" ...

The target writes a greedy answer to each prompt. Then every decoding step is replayed: search,
build the tree, accept the path that the answer took. Prints tokens per step of the target for the
default policy, which allows all nodes, and for `shallow` below. Of the nodes that a policy allows,
the most probable are kept.
"""

import argparse
from dataclasses import replace

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_redrafter import ExploredNodes, TokenTree, accept_path, load_drafter
from vllm_redrafter.replay.target import hidden_states
from vllm_redrafter.tree.beam_search import beam_search

K, BEAM_WIDTH, BEAM_LENGTH = 8, 4, 5


def default(explored: ExploredNodes) -> Tensor:
    """Which nodes may be in the tree, [requests, levels, beams]; if one may, so must its parent."""
    return torch.ones_like(explored.log_probs, dtype=torch.bool)


def shallow(explored: ExploredNodes) -> Tensor:
    """The first three levels: more of their nodes are verified then."""
    level = torch.arange(explored.log_probs.shape[1])[:, None]
    return (level < 3).expand_as(explored.log_probs)


@torch.inference_mode()
def count_steps(policy, drafter, target, tokens, root) -> int:
    """Steps that write tokens [1, T] from `root` on, which is the first token of the answer."""
    hidden = hidden_states(target, drafter.config.target_layers, input_ids=tokens)
    embed, last, steps = target.get_input_embeddings(), tokens.shape[1] - 1, 0
    while root < last:
        state, token = hidden[:, root - 1], tokens[:, root]
        explored = beam_search(drafter, embed, state, token, BEAM_WIDTH, BEAM_LENGTH)
        log_probs = explored.log_probs.masked_fill(~policy(explored), -torch.inf)
        tree = TokenTree.from_explored(token, replace(explored, log_probs=log_probs), max_nodes=K)
        # The target's token after each node: right for nodes on the answer's path, as in the walk.
        following = root + 1 + tree.depths.long()
        said = tokens.gather(1, following.clamp(max=last)).masked_fill(following > last, -1)
        root += int(accept_path(tree, said).num_sampled)
        steps += 1
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    drafter = load_drafter(args.drafter)
    answers = []  # tokens [1, T], and where the answer begins
    for prompt in args.prompts:
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        written = target.generate(tokens, do_sample=False, max_new_tokens=args.max_tokens)
        answers.append((written, tokens.shape[1]))
    num_tokens = sum(written.shape[1] - root - 1 for written, root in answers)
    for policy in (default, shallow):
        steps = sum(count_steps(policy, drafter, target, *answer) for answer in answers)
        print(f"{policy.__name__}: {num_tokens / steps:.2f} tokens per step")


if __name__ == "__main__":
    main()
