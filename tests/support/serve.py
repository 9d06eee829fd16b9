"""`vllm serve`, drafting with the oracle: serve.py TARGET [any of vllm serve's arguments]."""

import sys

from vllm.entrypoints.cli.main import main

from vllm_redrafter import names

if __name__ == "__main__":
    names.CPU_PROPOSER = "oracle.OracleProposer"
    names.V2_SPECULATOR = "oracle_v2.OracleSpeculator"
    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    main()
