# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster on this machine, whose nodes have logical GPUs, for vLLM on CPUs."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from redrafter_testing import process_trees
from redrafter_testing.python_path import SUPPORT, python_path

ATTEMPTS = 3
"""Ray gives each node 30 seconds to start, which are too few where others are busy."""


@contextmanager
def ray_cluster(environment: Mapping[str, str], *gpus: int) -> Iterator[dict[str, str]]:
    """The environment to use a cluster that has a node with each number of GPUs.

    Some of `environment` is read when a worker imports vLLM.
    """
    # A short name, since sockets lie there.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        token = Path(folder, "token")
        token.write_text("0" * 64)
        others = environment.get("PYTHONPATH", python_path(SUPPORT))
        whole = {
            **environment,
            "PYTHONPATH": os.pathsep.join([str(SUPPORT / "ray_platform"), others]),
            "RAY_TMPDIR": folder,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),  # else Ray writes one into the home folder
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_prestart_worker_first_driver": "0",
        }
        command = [sys.executable, "-P", __file__, *gpus]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with ExitStack() as stack:
            for _ in range(ATTEMPTS):
                started = process_trees.started(command, **pipes, env={**os.environ, **whole})
                process = stack.enter_context(started)
                assert process.stdout is not None
                if address := process.stdout.readline().strip():
                    break
            assert address, "Ray did not start"
            yield {**whole, "RAY_ADDRESS": address}


# In a process of its own: Ray reads how to authenticate while it is imported.


def main(*gpus: int) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for of_node in gpus:
        options = {"object_store_memory": 100 << 20, "include_dashboard": False}
        cluster.add_node(num_cpus=2, num_gpus=of_node, **options)
    print(cluster.address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
