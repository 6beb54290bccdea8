"""`bench KIND …`: what training and its all-reduce cost here; each kind is a module with `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import importlib

KINDS = {
    "scaling": "one rank, all ranks, and independent processes: the scaling factor of a model's training",
    "record": "time one rank's training step, gradient by gradient, for replay and predict",
    "replay": "many ranks whose computing is a recording and whose all-reduce is real: compare its settings",
    "allreduce": "our all-reduce layer, torch's DDP, Horovod's optimizer and processes that share nothing, in turn",
    "predict": "the scaling factor on a GPU cluster, from its links and one GPU's step; held against published figures",
    "process": "one process of a measurement; started by the others",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, summary in KINDS.items():
        _module(name).add_arguments(kinds.add_parser(name, help=summary, description=summary))


def run(options: argparse.Namespace) -> int:
    return int(_module(options.kind).run(options))


def _module(kind: str):  # type: ignore[no-untyped-def]
    return importlib.import_module(f"pipelines.bench.{kind}")
