# SPDX-License-Identifier: Apache-2.0
"""The families of targets that are shown to be served: docs/compatibility.md, "Targets"."""

from redrafter_testing.models.families.audio import AUDIO
from redrafter_testing.models.families.dense import DENSE
from redrafter_testing.models.families.experts import EXPERTS
from redrafter_testing.models.families.family import Family
from redrafter_testing.models.families.gemma import GEMMA
from redrafter_testing.models.families.quantised import QUANTISED
from redrafter_testing.models.families.vision import VISUAL

FAMILIES: tuple[Family, ...] = (*DENSE, *EXPERTS, *AUDIO, *VISUAL, *GEMMA, *QUANTISED)


def families_on(engine: str) -> list[Family]:
    """Those that this engine serves."""
    return [family for family in FAMILIES if engine in family.engines]
