# SPDX-License-Identifier: Apache-2.0
"""A file of prompts that grows line by line, and that a stopped run is continued in.

Beside PROMPTS.jsonl lies PROMPTS.jsonl.made-with.json: what the prompts were made with, so that
nothing else is mixed in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_redrafter.data.output_folder import check_same
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import lock, whole_file
from vllm_redrafter.utils.json_files import parse_json, read_json


class PromptFile:
    """Prompts that differ from one another, each with the number of the attempt that made it.

    Args:
        path: the file; it and its folder are made where they are missing.
        made_with: all that the prompts depend on.

    Raises:
        ConfigError: the file was made otherwise, another process is writing it, or it cannot be
            written.
    """

    def __init__(self, path: Path, made_with: dict[str, Any]) -> None:
        self._path = path.expanduser()
        record = self._path.with_name(f"{self._path.name}.made-with.json")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self._path.exists() or not self._path.stat().st_size
            self._file = self._path.open("a+b")
        except OSError as error:
            raise ConfigError(f"--output {path}: cannot be written to: {error}") from error
        try:
            busy = f"--output {path}: another process is writing there"
            lock(self._file, f"{busy}; wait for it to end, or give another file")
            if is_new:
                with whole_file(record) as file:
                    file.write((json.dumps(made_with, indent=2) + "\n").encode())
            else:
                check_same(self._path, _made_with(self._path, record), made_with)
            self._seen: set[str] = set()
            self.next_attempt = 0
            self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other processes write the file."""
        self._file.close()

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, messages: list[dict[str, str]], attempt: int) -> bool:
        """Append a prompt, the last message.

        False where the file says the same already, but for case and blanks. The attempt's number
        is larger than all before.
        """
        same = _normalised(messages[-1]["content"])
        if same in self._seen:
            return False
        line = json.dumps({"messages": messages, "attempt": attempt}, ensure_ascii=False) + "\n"
        try:
            self._file.write(line.encode())
            self._file.flush()
        except OSError as error:
            raise ConfigError(
                f"{self._path}: cannot be written to ({error.strerror}); what is in it is kept: "
                "make room and start the same command again"
            ) from error
        self._seen.add(same)
        self.next_attempt = attempt + 1
        return True

    def _read(self) -> None:
        """Take over what is there; the line that a killed run did not finish is cut off."""
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                row = parse_json(line)
                text = row["messages"][-1]["content"]
                self.next_attempt = int(row["attempt"]) + 1
            except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
                raise ConfigError(
                    f"{self._path}, line {number}: not what make-prompts writes ({error!r}); give "
                    "another --output"
                ) from error
            self._seen.add(_normalised(text))
            whole += len(line)
        self._file.truncate(whole)


def _normalised(text: str) -> str:
    return " ".join(text.casefold().split())


def _made_with(path: Path, record: Path) -> dict[str, Any]:
    try:
        return dict(read_json(record))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--output {path} exists, and {record.name}, which would say how it was made, cannot "
            "be read: give another file"
        ) from error
