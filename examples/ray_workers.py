# SPDX-License-Identifier: Apache-2.0
"""Run the parts of generate-data or capture as tasks of a Ray cluster, each with GPUs of its own.

    python examples/ray_workers.py --parts 4 --gpus 2 \\
        generate-data TARGET --prompts /shared/prompts.jsonl --output /shared/data \\
        --tensor-parallel-size 2

What follows the options of this script is a command of vllm-redrafter, whose paths are absolute and
on a disk that all machines share. Ray starts a part again whose process was killed or whose machine
was lost, and it continues. A part that ends with an error is not started again: run the script once
more when its cause is gone.
"""

from __future__ import annotations

import argparse
import os
import sys

import ray


def run_part(arguments: list[str]) -> int:
    """The exit status of a command, run in a process of Ray's."""
    # vLLM's workers must be no copies of that process, which has threads.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm_redrafter.cli.main import app

    return app(arguments, standalone_mode=False) or 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=int, required=True)
    parser.add_argument("--gpus", type=int, default=1, help="of each part")
    parser.add_argument("--retries", type=int, default=3, help="of each part")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()

    ray.init("auto")
    task = ray.remote(num_gpus=args.gpus, max_retries=args.retries)(run_part)
    parts = [f"{number}/{args.parts}" for number in range(1, args.parts + 1)]
    # All of them are waited for: those that run end with this script.
    return max(ray.get([task.remote([*args.command, "--part", part]) for part in parts]))


if __name__ == "__main__":
    sys.exit(main())
