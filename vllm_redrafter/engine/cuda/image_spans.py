# SPDX-License-Identifier: Apache-2.0
"""PrefixLM: the tokens of an image see one another, those behind them included.

That concerns rows of a prompt alone. A tree's rows come after all images, and see all of them.
"""

from __future__ import annotations

from vllm.v1.attention.backend import CommonAttentionMetadata

Spans = dict[int, list[tuple[int, int]]]
"""By the request's place in the batch, the first and last position of each of its images."""


def spans_read(step: CommonAttentionMetadata) -> Spans | None:
    """Of a step's images, those of which it reads a token; None where it reads no image's.

    vLLM names all images of all requests in every step, and its kernel then looks for them.
    """
    images, reading = step.mm_req_doc_ranges, step.is_prefilling
    lengths = step.seq_lens_cpu_upper_bound  # exact where a prompt is read
    assert images is not None and reading is not None and lengths is not None
    read: Spans = {}
    for request in reading.nonzero().flatten().tolist():
        first, behind = step.query_start_loc_cpu[request : request + 2].tolist()
        end = int(lengths[request])
        begin = end - (behind - first)
        read[request] = [span for span in images[request] if span[0] < end and span[1] >= begin]
    return read if any(read.values()) else None
