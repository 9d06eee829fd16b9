# SPDX-License-Identifier: Apache-2.0
"""Room for earlier answers, and who sees whose."""

from vllm_redrafter.tree.earlier_answers import Partitions, num_places


def test_places_are_a_power_of_two_within_limits() -> None:
    sizes = [num_places(most) for most in (1, 16, 17, 4096, 1_000_000)]
    assert sizes == [4096, 4096, 8192, 1 << 20, 1 << 20]


def test_partitions_are_remembered_by_use_and_never_given_again() -> None:
    partitions = Partitions(2)
    assert [partitions.begin("a request", key) for key in "abab"] == [0, 1, 0, 1]
    assert [partitions.begin("a request", key) for key in "cbabc"] == [2, 1, 3, 1, 4]


def test_answers_of_requests_that_began_before_a_reset_are_not_entered() -> None:
    partitions = Partitions(2)
    for name, key in (("d", "key"), ("b", None), ("a", "key")):
        partitions.begin(name, key)
    assert partitions.of == {"d": 0, "b": -1, "a": 0}
    assert partitions.finish({"d", "b"}) == [("b", -1), ("d", 0)]
    partitions.reset()
    partitions.begin("c", "key")
    assert partitions.finish({"a", "c"}) == [("c", 0)]
    assert partitions.of == {}
