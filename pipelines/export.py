"""`export lane RUN`: one ONNX file, checked against torch, with a model card and a record of where it comes from."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from perception.errors import UserError
from perception.run_folder import check_folder_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", choices=["lane"], help="what the model finds")
    parser.add_argument("run", type=Path, help="a run folder, whose best checkpoint is taken, or a checkpoint in one")
    parser.add_argument("--out", type=Path, metavar="FILE", help="by default RUN/NAME.onnx or RUN/NAME-int8.onnx")
    parser.add_argument("--batch", default="1", metavar="N|dynamic", help="images at once (default: %(default)s)")
    parser.add_argument("--int8", action="store_true", help="convolutions in 8 bits, calibrated on generated scenes")
    parser.add_argument("--calibration-scenes", type=int, default=100, metavar="N", help="default: %(default)s")
    parser.add_argument("--check-scenes", type=int, default=200, metavar="N", help="default: %(default)s")


def run(options: argparse.Namespace) -> int:
    """Exit code 0, or 2 where a check fails: then nothing is written."""
    out: Path | None = options.out
    if out is not None and out.suffix.lower() != ".onnx":
        raise UserError(f"--out {out}: name a file that ends in .onnx")
    check_folder_of("--out", out)
    batch = _parse_batch(options.batch)
    for name in ("calibration_scenes", "check_scenes"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be 1 or more")
    # torch is imported here so that --help answers at once.
    from perception.export import ExportOptions, export_model
    from perception.provenance import card_path, record_path
    from perception.run_model import load_trained

    trained = load_trained(options.run)
    if trained.config.task != options.task:
        raise UserError(f"{options.run}: a {trained.config.task} model; export {trained.config.task} is not there yet")
    chosen = ExportOptions(
        batch=batch,
        int8=options.int8,
        num_calibration_scenes=options.calibration_scenes,
        num_check_scenes=options.check_scenes,
    )
    if out is None:
        out = trained.run.path / f"{trained.config.name}{'-int8' if options.int8 else ''}.onnx"
    started = time.monotonic()
    export_model(trained, out, chosen, lambda line: print(line, flush=True))
    print(f"exported in {time.monotonic() - started:.0f} s")
    for path in (out, card_path(out), record_path(out)):
        print(f"wrote {path}")
    return 0


def _parse_batch(text: str) -> int | None:
    if text == "dynamic":
        return None
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1024:
        raise UserError(f"--batch {text}: a whole number from 1 to 1024, or dynamic")
    return int(text)
