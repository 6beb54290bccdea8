"""Train lane-small and two simple peers alike and print how each did.

python -m tests.baselines train [lane-small row-anchor segmentation] --out FOLDER [--samples N] [--set NAME=VALUE …]

12,000 samples are 145 s of one core for lane-small, less for the others, and evaluations beside them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from perception.errors import UserError, nearest

NAMES = ("lane-small", "row-anchor", "segmentation")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.baselines", description="Train lane-small and two simple peers alike and compare them."
    )
    commands = parser.add_subparsers(required=True)
    train = commands.add_parser("train", help="train, evaluate, print a table")
    train.add_argument("networks", nargs="*", default=NAMES, help=f"of {', '.join(NAMES)}; all if none is named")
    train.add_argument("--out", type=Path, required=True, help="folder for a run folder a network and comparison.json")
    train.add_argument("--samples", type=int, default=12_000, help="of each run (default: %(default)s)")
    train.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="e.g. --set train.seed=1")
    options = parser.parse_args(arguments)
    try:
        for name in options.networks:
            if name not in NAMES:
                raise UserError(f'network "{name}" is unknown{nearest(name, NAMES)}')
        # Imported here: --help and mistakes answer without torch.
        from tests.baselines.comparison import compare, table

        figures = compare(options.networks, options.out, options.samples, options.set)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(*table(figures), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
