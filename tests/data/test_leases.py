"""Leases of shards: one client each, until it ends or falls silent; with clocks that are set."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vllm_redrafter.data import leases
from vllm_redrafter.data.leases import PATIENCE_SECONDS, ShardLeases
from vllm_redrafter.utils.errors import ConfigError

SHARDS = range(3)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_each_shard_has_one_client(tmp_path: Path, clock: Clock) -> None:
    clients = [ShardLeases(tmp_path, clock) for _ in range(2)]
    taken = [client.take(SHARDS) for client in (*clients, *clients)]
    assert taken == [0, 1, 2, None]
    clients[1].release(1)
    assert [client.take(SHARDS) for client in clients] == [1, None]


def test_of_many_clients_at_once_one_has_the_lease(tmp_path: Path) -> None:
    clients = [ShardLeases(tmp_path) for _ in range(16)]
    start, taken = threading.Barrier(16, timeout=20), []

    def compete(client: ShardLeases) -> None:
        start.wait()
        taken.extend(shard for _ in range(4) if (shard := client.take(range(40))) is not None)

    threads = [threading.Thread(target=compete, args=(client,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(taken) == list(range(40)), "who loses a race takes the next one"


def test_what_is_renewed_is_not_taken_over(tmp_path: Path, clock: Clock) -> None:
    holder, other = ShardLeases(tmp_path, clock), ShardLeases(tmp_path, clock)
    assert holder.take([0]) == 0
    for _ in range(10):
        assert other.take([0]) is None
        clock.now += PATIENCE_SECONDS - 1
        holder.renew()


def test_what_is_not_renewed_is_taken_over_once(tmp_path: Path, clock: Clock) -> None:
    silent, *others = (ShardLeases(tmp_path, clock) for _ in range(3))
    assert silent.take([0]) == 0
    # However long ago it was taken: each client waits by itself, clocks of machines may disagree.
    clock.now += 100 * PATIENCE_SECONDS
    assert [other.take([0]) for other in others] == [None, None]
    clock.now += PATIENCE_SECONDS
    assert [other.take([0]) for other in others] == [0, None]
    assert files(tmp_path) == [".lease-00000.0", ".lease-00000.1"]
    # The first one wakes up: neither its renewals nor its end touch the other's lease.
    silent.renew()
    silent.release(0)
    assert files(tmp_path) == [".lease-00000.1"]
    clock.now += PATIENCE_SECONDS - 1
    assert others[1].take([0]) is None
    others[0].release(0)
    assert files(tmp_path) == []


def test_a_released_lease_is_not_created_again_by_its_renewal(tmp_path: Path, clock: Clock) -> None:
    holder, other = ShardLeases(tmp_path, clock), ShardLeases(tmp_path, clock)
    holder.take([0])
    other.sweep()
    holder.renew()
    assert files(tmp_path) == []


def test_a_block_renews_its_leases_and_ends_them(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEWAL_SECONDS", 0.01)
    renewed = threading.Event()
    monkeypatch.setattr(ShardLeases, "renew", lambda self: renewed.set())
    with ShardLeases(tmp_path, clock) as holder:
        holder.take(SHARDS)
        holder.take(SHARDS)
        assert renewed.wait(20)
        assert len(files(tmp_path)) == 2
    assert files(tmp_path) == []


PROGRAM = """
import sys
from pathlib import Path
from vllm_redrafter.data.leases import ShardLeases
print(ShardLeases(Path(sys.argv[1])).take([0]), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells, and clients wait")
def test_the_lease_of_a_process_that_was_killed_here_is_free_at_once(
    tmp_path: Path, clock: Clock
) -> None:
    other = ShardLeases(tmp_path, clock)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "0\n"
        assert other.take([0]) is None
    finally:
        process.kill()
        process.communicate(timeout=20)
    assert other.take([0]) == 0


def test_a_process_of_another_machine_is_waited_for(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, near = ShardLeases(tmp_path, clock), ShardLeases(tmp_path, clock)
    with monkeypatch.context() as there:
        there.setattr(leases, "_machine", lambda: "another boot")
        there.setattr("os.getpid", lambda: 2**22 + 1)  # no process here has this number
        far.take([0])
    assert near.take([0]) is None
    clock.now += PATIENCE_SECONDS
    assert near.take([0]) == 0


@pytest.mark.parametrize("number", [10**400, 2**64, float("inf"), float("nan")])
def test_a_process_that_cannot_be_is_waited_for(
    number: float, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, near = ShardLeases(tmp_path, clock), ShardLeases(tmp_path, clock)
    with monkeypatch.context() as there:
        there.setattr("os.getpid", lambda: number)
        far.take([0])
    assert near.take([0]) is None
    clock.now += PATIENCE_SECONDS
    assert near.take([0]) == 0


def test_the_lease_of_a_client_that_was_killed_before_it_wrote_a_word_is_taken_over(
    tmp_path: Path, clock: Clock
) -> None:
    (tmp_path / ".lease-00000.0").touch()
    other = ShardLeases(tmp_path, clock)
    assert other.take([0]) is None
    clock.now += PATIENCE_SECONDS
    assert other.take([0]) == 0


def test_a_folder_that_cannot_be_written_to_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=r"cannot be written to: .*Permission denied"):
        ShardLeases(tmp_path).take([0])
