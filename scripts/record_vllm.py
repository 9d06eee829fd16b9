# SPDX-License-Identifier: Apache-2.0
"""Record what a version of vLLM has of the symbols that we rely on, and print what is different.

    .venv/bin/python scripts/record_vllm.py FOLDER --print-only

The record is `tests/support/redrafter_testing/vllm_symbols.json`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from redrafter_testing.vllm_options import vllm_folder
from redrafter_testing.vllm_symbols import (
    RECORDED,
    Record,
    names,
    numbers,
    read_records,
    signatures,
    unjudged,
)


def with_version(
    records: Mapping[str, Record], version: str, symbols: dict[str, str | None]
) -> dict[str, Record]:
    """The records with one more, or with one renewed; reasons that were given are kept."""
    old = records.get(version, Record({}, {}, {}))
    added = {**records, version: Record(symbols, old.differences, old.absent)}
    ordered = {v: added[v] for v in sorted(added, key=numbers)}
    for before, later in pairwise(ordered.values()):
        known = before.symbols.keys() | later.symbols.keys()
        names = (n for n in known if before.symbols.get(n) != later.symbols.get(n))
        later.differences = {name: later.differences.get(name, "") for name in sorted(names)}
    oldest = next(iter(ordered.values()))
    oldest.differences = {}
    for record in ordered.values():
        absent = [name for name, found in record.symbols.items() if found is None]
        record.absent = {name: record.absent.get(name, "") for name in absent}
    return ordered


def described(records: Mapping[str, Record], version: str) -> Iterator[str]:
    """Lines that tell what is different in a version, and why that does not concern us."""
    versions = list(records)
    record = records[version]
    yield f"vLLM {version}: {len(record.symbols)} symbols"
    if (index := versions.index(version)) > 0:
        before = records[versions[index - 1]]
        yield f"{len(record.differences)} differ from vLLM {versions[index - 1]}:"
        for name, reason in record.differences.items():
            yield f"  {name}"
            yield f"    - {before.symbols.get(name)}"
            yield f"    + {record.symbols.get(name)}"
            yield f"    {reason or 'no reason yet'}"
    yield f"{len(record.absent)} do not exist:"
    for name, reason in record.absent.items():
        yield f"  {name}"
        yield f"    {reason or 'no reason yet'}"


def version_of(root: Path) -> str:
    """The version of the vLLM below `root`, without a local part such as `+cpu`."""
    file = root / "vllm" / "_version.py"
    if not file.exists():
        sys.exit(f"{root}: there is no vllm/_version.py below it; name the folder that has vllm/")
    found = re.search(r"^__version__ = .*['\"]([\d.]+)", file.read_text(), re.MULTILINE)
    return found[1] if found else sys.exit(f"{file}: it has no __version__")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Record what a version of vLLM has of the symbols that we rely on, and print "
        "what is different there from the version before it."
    )
    parser.add_argument(
        "root",
        type=Path,
        nargs="?",
        help="a folder that has vllm/, such as an unpacked wheel (default: the installed vLLM's)",
    )
    parser.add_argument("--print-only", action="store_true", help="do not write the record")
    arguments = parser.parse_args()
    root = arguments.root or vllm_folder().parent
    version = version_of(root)
    records = with_version(read_records(), version, signatures(root, names()))
    print("\n".join(described(records, version)))
    if arguments.print_only:
        return
    values = {version: asdict(record) for version, record in records.items()}
    RECORDED.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    if missing := unjudged(records[version]):
        print(f"write {len(missing)} reason(s) into {RECORDED}")


if __name__ == "__main__":
    main()
