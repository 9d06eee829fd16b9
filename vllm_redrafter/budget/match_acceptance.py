# SPDX-License-Identifier: Apache-2.0
"""How probable it is that the target goes on as a match did: learned while serving.

A node of a path is accepted the more probably, given its parent, the longer the match is and the
more of the path was accepted before. So there is a probability for each class of a match and each
depth, of greedy and of sampled requests: a Beta distribution's mean, whose observations fade.
"""

import numpy as np
import numpy.typing as npt

from vllm_redrafter.tree.context_matches import LONGEST_EARLIER, LONGEST_MATCH, SHORTEST_EARLIER

PRIOR_WEIGHT = 8.0
"""Observations that the prior counts as."""
MEMORY = 256.0
"""Observations of a class and depth that are remembered."""


def prior_acceptance(path_length: int) -> npt.NDArray[np.float64]:
    """[MATCH_CLASSES, D] of text of which nothing is known: what was accepted lengthens a match.

    An earlier answer is worth a match of own text with one token less. Where the second best place
    goes on alike, a quarter of refusals remain; where it does not, two fifths of acceptances.
    """
    of_earlier = range(SHORTEST_EARLIER - 1, LONGEST_EARLIER)
    lengths = np.array([*range(1, LONGEST_MATCH + 1), *of_earlier])[:, None]
    depths = np.arange(path_length)
    alone = np.asarray(0.85 - 0.67 * 0.6 ** (lengths - 1.0 + depths))
    parted = np.maximum(0.4 * alone, 1.0 / PRIOR_WEIGHT)
    return np.concatenate([alone, 1.0 - 0.25 * (1.0 - alone), parted])
