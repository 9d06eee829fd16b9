# SPDX-License-Identifier: Apache-2.0
"""Which Triton kernels a decoding step launches."""

AROUND_ATTENTION = {
    "_stage_trees",
    "_add_depths",
    "_accept_path",
    "_compact",
    "_select_nodes",
    "_finish_trees",
}

DRAFT = {
    "keep_top",
    "_merge_top",
    "_merge_depths",
    "_rank_candidates",
    "_gather_dot",
    "_grow_beams",
    "_draft_layer",
    "_gated_cell",
    "_scale_normed",
    "_observe_nodes",
    "_add_sums",
    "_rank_places",
    "_follow_places",
    "_join_matches",
    "_observe_matches",
}
