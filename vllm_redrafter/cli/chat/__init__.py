"""`vllm-redrafter chat`: talk to a target and see what its drafter guessed."""
