"""`predict RUN_OR_ONNX INPUT`: official-format files, drawings or an annotated video of what a model finds."""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from perception.errors import UserError

if TYPE_CHECKING:
    from perception.predict import PredictReport

LARGEST_BATCH = 65_536
LARGEST_THREADS = 4_096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="a run folder, a checkpoint in one, or an exported file (.onnx)")
    parser.add_argument("input", type=Path, help="an image, a folder of images, a list (.txt, .json) or a video")
    parser.add_argument("--out", type=Path, help="folder to write to; by default predictions/INPUT-TIME")
    parser.add_argument(
        "--format", default="auto", help="culane or tusimple for lanes, coco for signs; auto: by the list, else culane"
    )
    parser.add_argument("--root", type=Path, help="folder that a list's names are relative to")
    parser.add_argument("--batch", type=int, metavar="N", help="images in the network at once, by default 1")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="of the network; 0: all cores")
    parser.add_argument(
        "--follow", action="store_true", help="video: lanes keep their numbers from frame to frame, smoothed a little"
    )
    parser.add_argument("--no-drawings", action="store_true", help="write no pictures and no annotated video")


def run(options: argparse.Namespace) -> int:
    """Exit code 0; 2 where an image could not be read (the others are done), 130 after Ctrl-C."""
    report = predict(
        options.model,
        options.input,
        options.out,
        format=options.format,
        root=options.root,
        batch=options.batch,
        num_threads=options.threads,
        drawings=not options.no_drawings,
        follow=options.follow,
    )
    if report.interrupted:
        raise KeyboardInterrupt
    return 2 if report.problems else 0


def predict(
    model: Path,
    source: Path,
    out: Path | None = None,
    format: str = "auto",
    root: Path | None = None,
    batch: int | None = None,
    num_threads: int = 0,
    drawings: bool = True,
    follow: bool = False,
) -> PredictReport:
    """Predict `source` by `model` into the folder `out`, and print what was done.

    Raises UserError for a wrong model, input, format or folder before anything is written, and where the only image
    cannot be read.
    """
    # OpenCV and NumPy are imported here so that --help answers at once; torch only for a run folder.
    from perception.lane_follow import LaneFollower
    from perception.predict import open_predictor, predict_frames
    from perception.predict_inputs import open_input
    from perception.predict_outputs import (
        DrawingWriter,
        IdentityWriter,
        VideoDrawingWriter,
        Writer,
        check_format,
        official_writer,
    )

    if batch is not None and batch < 1:
        raise UserError(f"--batch {batch}: must be 1 or more")
    if num_threads < 0:
        raise UserError(f"--threads {num_threads}: must be 0 or more")
    for option, value, largest in (("--batch", batch or 1, LARGEST_BATCH), ("--threads", num_threads, LARGEST_THREADS)):
        if value > largest:
            raise UserError(f"{option} {value}: must be at most {largest}")
    folder = out or Path("predictions") / f"{source.stem}-{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}"
    _check_empty(folder)
    frames = open_input(source, root)
    predictor = open_predictor(model, num_threads)
    if predictor.fixed_batch is not None and batch not in (None, predictor.fixed_batch):
        raise UserError(f"--batch {batch}: {model} was exported for {predictor.fixed_batch}; export it with that batch")
    chosen = check_format(predictor.config.task, format, source.suffix.lower() == ".json")
    if follow and (frames.video is None or predictor.config.task != "lane"):
        raise UserError(f"--follow: goes with a lane model and a video; not so {source} with {model}")
    print(predictor.description, flush=True)
    for note in frames.notes:
        print(f"note: {note}", flush=True)
    frames.notes.clear()
    writers: list[Writer] = [official_writer(chosen, folder, predictor.classes)]
    if follow:
        writers.append(IdentityWriter(folder / "identities.json"))
    if drawings and frames.video is not None:
        writers.append(VideoDrawingWriter(folder / "annotated.mp4", frames.video.frames_per_second, predictor.classes))
    elif drawings:
        writers.append(DrawingWriter(folder / "drawings", predictor.classes))
    report = predict_frames(
        predictor, frames, writers, predictor.fixed_batch or batch or 1, follower=LaneFollower() if follow else None
    )
    if not report.num_images and report.problems:
        raise UserError(report.problems[0])
    if report.num_left_out:
        frames.notes.append(
            f"{report.num_left_out} lanes left out, beyond the surest that model.max_lanes allows an image: train with "
            "a greater one"
        )
    _tell(report, frames.num_frames, frames.notes, predictor.config.task)
    return report


def _tell(report: PredictReport, num_frames: int | None, notes: list[str], task: str) -> None:
    from perception.overlay import DRAWN_SCORE

    for note in notes:
        print(f"note: {note}")
    total = f" of {num_frames}" if num_frames is not None and (report.interrupted or report.problems) else ""
    things = {"lane": "lanes", "sign": f"signs of a score of {DRAWN_SCORE:g} or more"}[task]
    print(
        f"{'interrupted after ' if report.interrupted else ''}{report.num_images}{total} images, {report.num_objects} "
        f"{things}, {report.num_empty} images without"
    )
    print(report.timing())
    for line in report.written:
        print(line)
    if report.problems:
        print(f"error: {len(report.problems)} images could not be read, see above", file=sys.stderr)


def _check_empty(folder: Path) -> None:
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"--out {folder}: is there already and not an empty folder; give another")
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be read ({error.strerror}); give another") from None
