"""Who writes which shard, where several clients write to one folder.

A client leases a shard by a file that only one can create, and renews the lease by writing to it:

```
DIR/
  .lease-00003.0    shard 3's first lease
  .lease-00003.1    its second: the first one was not renewed, and another client took it over
```

The newest lease of a shard counts. When it has stayed the same for PATIENCE_SECONDS, by the clock
of the client that looks at it (those of two machines need not agree), or when its client was a
process of this machine that has ended, the next one may be created. A client that was only slow
then writes a shard that another client writes as well: the one that is there first stays, and
both are the same.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.json_files import parse_json

PATIENCE_SECONDS = 60.0
RENEWAL_SECONDS = 5.0
SECONDS_TO_END = 10.0
_NAME = re.compile(r"\.lease-(\d{5,})\.(\d+)")


class ShardLeases:
    """The shards of a folder that this client may write; a block that renews and ends the leases.

    Args:
        folder: the data's; it is there.
        clock: seconds, which only grow.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.client = secrets.token_hex(8)
        self._folder, self._clock = folder, clock
        self._held: dict[int, int] = {}
        self._beat = 0
        # What each foreign lease said when it last changed, and when that was seen.
        self._seen: dict[Path, tuple[bytes, float]] = {}
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep_renewing, daemon=True)

    def take(self, shards: Iterable[int]) -> int | None:
        """Lease the first of these shards that is free; None where none is.

        Raises:
            ConfigError: the folder cannot be written to.
        """
        newest = self._newest()
        for shard in shards:
            generation = newest.get(shard, -1)
            if generation >= 0 and not self._is_abandoned(self._path(shard, generation)):
                continue
            if self._create(shard, generation + 1):
                return shard
        return None

    def release(self, shard: int) -> None:
        """End the lease: the shard is finished, or somebody else shall write it."""
        with self._lock:
            generation = self._held.pop(shard)
        # The newest goes last: an older one alone would be taken over.
        for older in range(generation + 1):
            self._path(shard, older).unlink(missing_ok=True)

    def renew(self) -> None:
        """Say that this client is still there."""
        with self._lock:
            self._beat += 1
            for shard, generation in self._held.items():
                try:
                    # Not created anew: who removed it knows that the shard is finished.
                    with self._path(shard, generation).open("r+b") as file:
                        file.write(self._content())
                except OSError:
                    continue  # the next time, or another client takes it over

    def sweep(self) -> None:
        """Remove what killed clients left in a folder whose shards are all finished."""
        for path in self._folder.glob(".lease-*"):
            path.unlink(missing_ok=True)

    def __enter__(self) -> ShardLeases:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ending.set()
        self._thread.join(SECONDS_TO_END)
        for shard in list(self._held):
            self.release(shard)

    def _keep_renewing(self) -> None:
        while not self._ending.wait(RENEWAL_SECONDS):
            self.renew()

    def _path(self, shard: int, generation: int) -> Path:
        return self._folder / f".lease-{shard:05d}.{generation}"

    def _newest(self) -> dict[int, int]:
        """The generation of each leased shard's newest lease."""
        found: dict[int, int] = {}
        for entry in os.scandir(self._folder):
            if name := _NAME.fullmatch(entry.name):
                shard, generation = int(name[1]), int(name[2])
                found[shard] = max(generation, found.get(shard, generation))
        return found

    def _create(self, shard: int, generation: int) -> bool:
        with self._lock:
            try:
                with self._path(shard, generation).open("xb") as file:
                    file.write(self._content())
            except FileExistsError:
                return False
            except OSError as error:
                raise ConfigError(
                    f"--output {self._folder}: cannot be written to: {error}"
                ) from error
            self._held[shard] = generation
        return True

    def _is_abandoned(self, lease: Path) -> bool:
        try:
            # Read, not looked at: a network's file system may answer from memory what a file's
            # time is, but not what an opened file says.
            content = lease.read_bytes()
        except OSError:
            return False  # just released: it is free when it is looked for again
        before, since = self._seen.get(lease, (None, 0.0))
        if content != before:
            self._seen[lease] = content, self._clock()
            return _has_ended_here(content)
        return self._clock() - since >= PATIENCE_SECONDS or _has_ended_here(content)

    def _content(self) -> bytes:
        """Always of the same length, so that it can be written over what is there."""
        values = {
            "client": self.client,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "machine": _machine(),
            "renewed": f"{self._beat:010d}",
        }
        return json.dumps(values).encode()


def _has_ended_here(content: bytes) -> bool:
    """Was the lease a process's of this machine, and is that process gone?"""
    try:
        values = parse_json(content)
        machine, pid = values["machine"], int(values["pid"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return False  # just being written
    if machine is None or machine != _machine():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # somebody else's process, or no number of one
    return False


def _machine() -> str | None:
    """What two processes share that know each other by number; None where nobody says."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None
