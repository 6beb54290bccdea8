"""What `predict` takes: an image, a folder, a list or a video, as a stream of frames with official names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from perception.data.culane import read_image_list
from perception.data.images import IMAGE_SUFFIXES, find_image, locate_images, read_image
from perception.data.sample import ReadReport
from perception.data.tusimple import read_tusimple_file
from perception.errors import UserError
from perception.video import VIDEO_SUFFIXES, VideoReader

_LEVELS_ABOVE_LIST = 3
"""Lists lie in the data folder, in list/ or in list/test_split/ of it."""


@dataclass(frozen=True)
class Frame:
    """One image to predict, or why there is none."""

    name: str
    """Relative path with forward slashes; of a video's frame VIDEO/00000.jpg, as CULane names them."""
    image: NDArray[np.uint8] | None
    """(H, W, 3) uint8 RGB; None where it cannot be read."""
    h_samples: tuple[int, ...] | None = None
    """Rows that a TuSimple list asks for."""
    problem: str = ""


@dataclass
class Input:
    """An image, a folder, a list, or a video."""

    kind: str
    num_frames: int | None
    """None, or only claimed, for a video."""
    notes: list[str] = field(default_factory=list)
    """What a person should know: files passed over, entries repaired."""
    images: Sequence[tuple[str, Path, tuple[int, ...] | None]] = ()
    """Name, file and rows."""
    video: VideoReader | None = None

    def __iter__(self) -> Iterator[Frame]:
        """Frames in order; an image that cannot be read is a frame with a problem, never left out."""
        if self.video is not None:
            for number, image in enumerate(self.video):
                yield Frame(f"{self.video.path.name}/{number:05d}.jpg", image)
            self.notes += self.video.notes
            return
        for name, path, rows in self.images:
            try:
                frame = Frame(name, read_image(path), rows)
            except UserError as error:
                frame = Frame(name, None, rows, str(error))
            yield frame


def open_input(path: Path, root: Path | None = None) -> Input:
    """`root` is the folder that a list's names are relative to; by default the list's own or one above it.

    Raises UserError where there is nothing to predict, or listed images are missing.
    """
    suffix = path.suffix.lower()
    if path.is_dir():
        chosen = _folder(path)
    elif not path.exists():
        raise UserError(f"{path}: no such image, folder, list or video")
    elif suffix in IMAGE_SUFFIXES:
        chosen = Input("image", 1, images=[(path.name, path, None)])
    elif suffix in VIDEO_SUFFIXES:
        video = VideoReader(path)
        chosen = Input("video", video.num_frames, video=video)
    elif suffix in (".txt", ".json"):
        chosen = _list(path, root)
    else:
        known = ", ".join((*IMAGE_SUFFIXES, *VIDEO_SUFFIXES))
        raise UserError(f"{path}: neither an image or video ({known}), nor a list (.txt, .json), nor a folder")
    if root is not None and chosen.kind != "list":
        raise UserError(f"--root {root}: goes with a list of images, {path} is none")
    _refuse_clashes(chosen, path)
    return chosen


def _folder(path: Path) -> Input:
    files = sorted(file for file in path.rglob("*") if file.is_file())
    images = [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
    others = [file for file in files if file.suffix.lower() not in IMAGE_SUFFIXES]
    if not images:
        videos = [file for file in others if file.suffix.lower() in VIDEO_SUFFIXES]
        hint = f"; give a video by itself, e.g. {videos[0]}" if videos else ""
        raise UserError(f"{path}: no image ({', '.join(IMAGE_SUFFIXES)}) in this folder or below{hint}")
    chosen = Input("folder", len(images), images=[(file.relative_to(path).as_posix(), file, None) for file in images])
    if others:
        chosen.notes.append(
            f"{path}: {len(others)} files that are no images passed over (first: {others[0].relative_to(path)})"
        )
    return chosen


def _list(path: Path, root: Path | None) -> Input:
    report = ReadReport()
    listed: dict[str, tuple[str, tuple[int, ...] | None]] = {}
    entries: list[tuple[str, str, tuple[int, ...] | None]]
    if path.suffix.lower() == ".json":
        records = read_tusimple_file(path, report, needs_rows=False)
        entries = [(record.raw_file, record.where, record.h_samples) for record in records]
    else:
        entries = [(entry.name, entry.where, None) for entry in read_image_list(path, report)]
    for name, where, rows in entries:
        if ".." in PurePosixPath(name).parts:
            raise UserError(f"{where}: {name}: an image path must not leave the data folder by ..")
        if not PurePosixPath(name).suffix:
            raise UserError(f"{where}: {name}: an image path with its suffix is wanted, e.g. {name}.jpg")
        if name in listed:
            report.note("image listed twice: predicted once", where)
        listed.setdefault(name, (where, rows))
    folder = root if root is not None else _root_of(path, next(iter(listed)))
    if not folder.is_dir():
        raise UserError(f"--root {folder}: folder does not exist; give the one that the list's names are relative to")
    names = locate_images(folder, [(name, where) for name, (where, _) in listed.items()], True, report)
    images = [(name, folder / found, rows) for (name, (_, rows)), found in zip(listed.items(), names, strict=True)]
    return Input("list", len(images), report.lines(), images)


def _root_of(path: Path, first: str) -> Path:
    """The list's folder, or the first one above it that holds the first image."""
    above = [path.absolute().parent, *path.absolute().parent.parents][:_LEVELS_ABOVE_LIST]
    return next((folder for folder in above if find_image(folder / first)), path.parent)


def _refuse_clashes(chosen: Input, path: Path) -> None:
    """Files are named after images without their suffix: two of one stem would overwrite each other's."""
    seen: dict[PurePosixPath, str] = {}
    for name, _, _ in chosen.images:
        other = seen.setdefault(PurePosixPath(name).with_suffix(""), name)
        if other != name:
            raise UserError(f"{path}: {other} and {name} would be written to files of the same name; predict one apart")
