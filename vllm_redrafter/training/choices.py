"""What a user may choose among; without imports, so that `--help` is quick."""

from typing import Literal

HeadName = Literal["recurrent", "gated", "medusa"]
"""Of `heads/registry.py`, as a test holds."""
LossKind = Literal["kl", "ce", "mix"]
Precision = Literal["no", "bf16"]
TargetDtype = Literal["auto", "float32", "bfloat16", "float16"]
Initialisation = Literal["lm_head", "random"]
