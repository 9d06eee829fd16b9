# SPDX-License-Identifier: Apache-2.0
"""`vllm serve`, drafting with the oracle: serve_with_oracle.py TARGET [any of its arguments]."""

import sys

from redrafter_testing.oracles import CPU_ORACLE, V2_ORACLE
from vllm_redrafter.engine.serve import serve
from vllm_redrafter.utils import names

if __name__ == "__main__":
    names.CPU_PROPOSER = CPU_ORACLE
    names.V2_SPECULATOR = V2_ORACLE
    serve(sys.argv[1:])
