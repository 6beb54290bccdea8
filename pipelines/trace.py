"""`trace FILE`: where an exported file comes from, verified by its hash."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="an exported file, with its record FILE.trace.json beside it")
    parser.add_argument(
        "--json", action="store_true", help="print the whole record, with all settings and code changes"
    )


def run(options: argparse.Namespace) -> int:
    """Exit code 0 where the file is the recorded one, else 2."""
    from perception.provenance import checkpoint_state, read_record, record_lines, verify

    record = read_record(options.file)
    sha256 = verify(options.file, record)
    if options.json:
        print(json.dumps(record, indent=2))
        return 0
    print(f"{options.file}: sha256 {sha256}, as recorded")
    for line in record_lines(record):
        print(f"  {line}")
    print(f"checkpoint: {checkpoint_state(record)}")
    return 0
