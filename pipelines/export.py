"""`export TASK RUN`: one ONNX file, checked against torch, with a model card and a record of where it comes from."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

from perception.errors import UserError
from perception.run_folder import check_folder_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", choices=["lane", "sign"], help="what the model finds")
    parser.add_argument("run", type=Path, help="a run folder, whose best checkpoint is taken, or a checkpoint in one")
    parser.add_argument("--out", type=Path, metavar="FILE", help="by default RUN/NAME.onnx or RUN/NAME-int8.onnx")
    parser.add_argument("--batch", default="1", metavar="N|dynamic", help="images at once (default: %(default)s)")
    parser.add_argument(
        "--size",
        metavar="WIDTHxHEIGHT|dynamic",
        help="sign: the one size of the input, larger images go in tiles; by default images of any size go whole",
    )
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
    size = _parse_size(options.size, options.task)
    for name in ("calibration_scenes", "check_scenes"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be 1 or more")
    # torch is imported here so that --help answers at once.
    from perception.export import ExportOptions, export_model
    from perception.provenance import card_path, record_path
    from perception.run_model import load_trained

    trained = load_trained(options.run)
    if trained.config.task != options.task:
        raise UserError(f"{options.run}: a {trained.config.task} model: export {trained.config.task} {options.run}")
    chosen = ExportOptions(
        batch=batch,
        size=size,
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


def _parse_size(text: str | None, task: str) -> tuple[int, int] | None:
    """Height and width; None for any."""
    if text is None or (text == "dynamic" and task == "sign"):
        return None
    if task != "sign":
        raise UserError(f"--size {text}: goes with signs; a lane model has the size of its own model.input_width")
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text, re.ASCII)
    if match is None:
        raise UserError(f"--size {text}: WIDTHxHEIGHT in pixels, e.g. 1376x800, or dynamic")
    width, height = int(match.group(1)), int(match.group(2))
    if width % 32 or height % 32 or not 64 <= min(width, height) <= max(width, height) <= 4096:
        nearest = "x".join(str(min(4096, max(64, -(-side // 32) * 32))) for side in (width, height))
        raise UserError(f"--size {text}: width and height are multiples of 32 from 64 to 4096, e.g. {nearest}")
    return height, width


def _parse_batch(text: str) -> int | None:
    if text == "dynamic":
        return None
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1024:
        raise UserError(f"--batch {text}: a whole number from 1 to 1024, or dynamic")
    return int(text)
