"""What people call: `vllm-redrafter <command>`, and `python -m vllm_redrafter`."""
