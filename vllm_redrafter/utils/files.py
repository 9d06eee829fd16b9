# SPDX-License-Identifier: Apache-2.0
"""Files and folders that get their name when they are complete, and checks of paths.

Until then they have another name beside it, which is removed when the writing fails.
"""

import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, BinaryIO

from safetensors import SafetensorError

from vllm_redrafter.utils.errors import ConfigError


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write; it is on the disk when it gets its name, in place of an older one."""
    partial = path.with_name(f".{path.name}.tmp")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    finally:
        partial.unlink(missing_ok=True)


def write_once(path: Path, content: bytes) -> None:
    """Write a file that several processes may write at once: the first one's stays."""
    own = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with whole_file(own) as file:
        file.write(content)
    try:
        os.link(own, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        if not path.exists():
            os.replace(own, path)
    finally:
        own.unlink(missing_ok=True)


def lock(file: IO[Any], busy: str) -> None:
    """Lock a file that is open for writing; ConfigError(busy) where another process has."""
    try:
        # lockf, not flock: child processes must not inherit it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(busy) from error
    except OSError:
        pass  # a file system without locks keeps nobody out


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill; it is made with its parents. OSError where `path` has content."""
    # Named after the process: two that write to the same place do not mix their files.
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def writing(what: object, remedy: str, kind: type[Exception] = ConfigError) -> Iterator[None]:
    """Raise an error of this kind, with the remedy, where the body cannot write (a full disk)."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise kind(f"{what} cannot be written: {reason}; {remedy}") from error


def check_writable(path: Path, option: str) -> None:
    """Refuse an option's file that cannot be written, before the work whose result it gets."""
    file = path.expanduser()
    with (
        writing(f"{option} {str(path)!r}", "name another file"),
        file.open("a") if file.exists() else TemporaryFile(dir=file.parent),
    ):
        pass


def numbered_files(folder: Path, before: str, after: str) -> list[int]:
    """The numbers of at least 5 digits in the names `before`NUMBER`after` of files, in order.

    ConfigError: a number has needless zeros: two files would be the same shard.
    """
    numbers = []
    for path in folder.glob(f"{before}*{after}"):
        digits = path.name.removeprefix(before).removesuffix(after)
        if len(digits) < 5 or not digits.isdecimal():
            continue
        if digits != (name := f"{int(digits):05d}"):
            raise ConfigError(
                f"{path} and {before}{name}{after} are two names of one shard: delete the former, "
                "or rename it so if the latter is missing"
            )
        numbers.append(int(digits))
    return sorted(numbers)


def check_no_pattern(model: str) -> None:
    """Refuse a folder with *, ? or [ in its name: vLLM and mlx-lm look for weights by `glob`."""
    folder = os.path.expanduser(model)
    if folder != glob.escape(folder) and os.path.isdir(folder):
        raise ConfigError(
            f"model {model!r}: *, ? and [ in a folder's name are a pattern where its weights are "
            "looked for, and another folder's would be loaded, or none: rename the folder, or give "
            "a link to it"
        )


def tail(log: Path, lines: int = 15) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/vllm-redrafter`, in ~/.cache where that is not set; without a home a
    RuntimeError."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-redrafter"
