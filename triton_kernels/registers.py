# SPDX-License-Identifier: Apache-2.0
"""How many registers a thread may have, where the compiler can be told."""

import torch


def register_limit(most: int | None) -> dict[str, int | None]:
    """Triton's option for it; AMD's compiler has none.

    Args:
        most: per thread; None leaves it to the assembler.
    """
    return {} if torch.version.hip else {"maxnreg": most}
