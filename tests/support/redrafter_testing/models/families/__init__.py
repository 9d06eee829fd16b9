# SPDX-License-Identifier: Apache-2.0
"""The families of targets that are shown to be served: docs/compatibility.md, "Targets"."""

from redrafter_testing.models.families.audio import AUDIO
from redrafter_testing.models.families.family import Family, families
from redrafter_testing.models.families.gemma import GEMMA
from redrafter_testing.models.families.quantised import QUANTISED
from redrafter_testing.models.families.vision import VISUAL

EXPERTS = families("experts")
FAMILIES: tuple[Family, ...] = (
    *(*families("dense"), *EXPERTS, *AUDIO, *VISUAL, *GEMMA, *QUANTISED),
)
MIXTRAL, EXPERTS_PER_ROW = EXPERTS[0], 2
"""Of experts."""


def families_on(engine: str) -> list[Family]:
    """Those that this engine serves."""
    return [family for family in FAMILIES if engine in family.engines]
