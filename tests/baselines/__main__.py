"""Train lane-small against two simple peers, or against itself without one of its parts, and print how each did.

python -m tests.baselines train [lane-small row-anchor segmentation] --out FOLDER [--samples N] [--set NAME=VALUE …]
python -m tests.baselines ablate [ROW …] --out FOLDER [--seeds N] [--processor-seconds S] [--jobs N]

12,000 samples are 145 s of one core for lane-small, less for the others, and evaluations beside them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from perception.errors import UserError, nearest

NAMES = ("lane-small", "row-anchor", "segmentation")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.baselines",
        description="Compare lane-small with two simple peers, or with parts left out.",
    )
    commands = parser.add_subparsers(required=True)
    train = commands.add_parser("train", help="train lane-small and its peers, evaluate, print a table")
    train.add_argument("networks", nargs="*", default=NAMES, help=f"of {', '.join(NAMES)}; all if none is named")
    train.add_argument("--out", type=Path, required=True, help="folder for a run folder a network and comparison.json")
    train.add_argument("--samples", type=int, default=12_000, help="of each run (default: %(default)s)")
    train.set_defaults(run=_train)
    ablate = commands.add_parser("ablate", help="train lane-small without one part at a time, print a table")
    ablate.add_argument("rows", nargs="*", help="by default all of tests/baselines/ablation.py")
    ablate.add_argument("--out", type=Path, required=True, help="folder for the runs; those in it are not done again")
    ablate.add_argument("--seeds", type=int, default=3, help="how many (default: %(default)s)")
    ablate.add_argument(
        "--processor-seconds", type=float, default=240.0, help="of one core for each run's training (%(default)s)"
    )
    ablate.add_argument("--jobs", type=int, default=2, help="runs at once, a core each (default: %(default)s)")
    ablate.set_defaults(run=_ablate)
    for command in (train, ablate):
        command.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="e.g. train.seed=1")
    options = parser.parse_args(arguments)
    try:
        lines = options.run(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(*lines, sep="\n")
    return 0


def _train(options: argparse.Namespace) -> list[str]:
    _known(options.networks, NAMES, "network")
    # Imported here, and below: --help and mistakes answer without torch.
    from tests.baselines.comparison import compare, table

    return table(compare(options.networks, options.out, options.samples, options.set))


def _ablate(options: argparse.Namespace) -> list[str]:
    from tests.baselines.ablation import ROWS, ablate, table

    _known(options.rows, ROWS, "row")
    rows, seeds = options.rows or list(ROWS), range(options.seeds)
    return table(ablate(rows, seeds, options.processor_seconds, options.out, options.jobs, options.set))


def _known(names: Sequence[str], known: Collection[str], kind: str) -> None:
    for name in names:
        if name not in known:
            raise UserError(f'{kind} "{name}" is unknown{nearest(name, known)}')


if __name__ == "__main__":
    raise SystemExit(main())
