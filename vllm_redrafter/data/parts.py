# SPDX-License-Identifier: Apache-2.0
"""`--part k/n`: one of n processes that write numbered shards into one folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import lock


@dataclass(frozen=True)
class Part:
    """The k-th of n parts.

    Attributes:
        number: k, from 1.
        of: n.
    """

    number: int
    of: int

    @classmethod
    def parse(cls, text: str, owner: str) -> Part:
        """From `k/n`.

        Args:
            text: what was given.
            owner: how a message begins, such as `capture:`.

        Raises:
            ConfigError: it is something else, or k is not from 1 to n.
        """
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        part = cls(int(found[1]), int(found[2])) if found else cls(0, 0)
        if not 1 <= part.number <= part.of:
            raise ConfigError(
                f"{owner} part must be k/n with k from 1 to n, such as 2/8; got {text!r}"
            )
        return part

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def has(self, shard: int) -> bool:
        """Does this part write the shard?"""
        return shard % self.of == self.number - 1

    @contextmanager
    def locked(self, folder: Path) -> Iterator[None]:
        """Keep other processes from writing this part; the folder is made where there is none.

        Raises:
            ConfigError: another process is writing it, or a part of another number of parts; or
                the folder cannot be written to.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / f".part-{self.number}-of-{self.of}.lock").open("w")
        except OSError as error:
            raise ConfigError(f"--output {folder}: cannot be written to: {error}") from error
        busy = f"--output {folder}: another process is writing part"
        with file:
            lock(file, f"{busy} {self}; wait for it to end, or give each its own --part")
            for other in folder.glob(".part-*-of-*.lock"):
                number, of = map(int, re.findall(r"\d+", other.name))
                if of != self.of:  # their shards are others
                    with other.open("a") as held:
                        lock(held, f"{busy} {number}/{of}; give all the same number of parts")
            yield
