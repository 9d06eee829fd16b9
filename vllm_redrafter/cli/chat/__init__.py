"""`vllm-redrafter chat`: talk to a server and see what its drafter guessed."""
