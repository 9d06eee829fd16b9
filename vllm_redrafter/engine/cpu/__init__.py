"""ReDrafter on vLLM's CPU backend (V1 model runner)."""
