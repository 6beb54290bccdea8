"""Several lane data sets as one, each with a weight: `--data mixture.toml`.

    [[part]]
    source = "../tusimple"          # relative to this file, or "generated"
    weight = 2.0                    # an epoch holds each of its images so often on average; 1 if left out
    format = "auto"                 # the rest as data.format, data.train_list and data.validation_list
    train_list = ""
    validation_list = ""

Validation holds the images of every part that has some, once each; metrics are given for each part too.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perception.data.sample import LaneDataset, LaneSample, LaneTruth, ReadReport
from perception.errors import UserError, nearest

SUFFIX = ".toml"
LARGEST_WEIGHT = 1000.0


@dataclass(frozen=True)
class Part:
    source: str
    """A folder as it can be opened from here, or "generated"."""
    weight: float = 1.0
    format: str = "auto"
    train_list: str = ""
    validation_list: str = ""

    @property
    def title(self) -> str:
        return Path(self.source).name


def read_mixture(path: Path) -> tuple[Part, ...]:
    """Parts in the file's order. Raises UserError that names the part and the field."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: mixture of data sets cannot be read ({error})") from None
    unknown = sorted(set(raw) - {"part"})
    if unknown:
        raise UserError(f'{path}: "{unknown[0]}" is unknown; a mixture has a table [[part]] for each data set')
    tables = raw.get("part")
    if not isinstance(tables, list) or not tables:
        raise UserError(f"{path}: no [[part]] in it; each names a source and may give a weight")
    parts = tuple(_part(path, number, table) for number, table in enumerate(tables, start=1))
    titles = [part.title for part in parts]
    twice = next((title for title in titles if titles.count(title) > 1), None)
    if twice is not None:
        raise UserError(f'{path}: two parts are called "{twice}": metrics are given by folder name, so rename one')
    return parts


def _part(path: Path, number: int, table: Any) -> Part:
    where = f"{path}: part {number}"
    fields = {field.name: field for field in dataclasses.fields(Part)}
    if not isinstance(table, dict):
        raise UserError(f"{where}: must be a table")
    for name, value in table.items():
        if name not in fields:
            raise UserError(f'{where}: field "{name}" is unknown{nearest(name, fields)}')
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_number if name == "weight" else isinstance(value, str)):
            raise UserError(
                f"{where}: field {name} must be {'a number' if name == 'weight' else 'a text'}, got {value!r}"
            )
    if not table.get("source"):
        raise UserError(f'{where}: field source is missing: a folder, or "generated"')
    weight = float(table.get("weight", 1.0))
    if not (math.isfinite(weight) and 0 < weight <= LARGEST_WEIGHT):
        raise UserError(f"{where}: weight = {weight:g}: must be above 0 and at most {LARGEST_WEIGHT:g}")
    source = table["source"]
    if source != "generated":
        source = str(path.parent / source)
    return Part(**{**table, "source": source, "weight": weight})


class MixedLanes:
    """A LaneDataset of several, one behind the other."""

    def __init__(self, parts: Sequence[tuple[Part, LaneDataset]]) -> None:
        self._parts = [(part.title, samples) for part, samples in parts]
        self._starts = np.cumsum([0, *(len(samples) for _, samples in self._parts)])
        weights = [np.full(len(samples), part.weight) for part, samples in parts]
        self.frequencies: NDArray[np.float64] | None = np.concatenate(weights)
        """(num_samples,) times that an epoch holds each image; None: once each."""
        if (self.frequencies == 1).all():
            self.frequencies = None
        self.report = ReadReport()
        for title, samples in self._parts:
            self.report.images += samples.report.images
            self.report.lanes += samples.report.lanes
            self.report.lane_counts += samples.report.lane_counts
            for anomaly, count in samples.report.anomalies.items():
                self.report.note(f"{title}: {anomaly}", samples.report.examples[anomaly], count)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def truth(self, index: int) -> LaneTruth:
        title, samples, inside = self._find(index)
        return _named(title, samples.truth(inside))

    def sample(self, index: int) -> LaneSample:
        title, samples, inside = self._find(index)
        sample = samples.sample(inside)
        return dataclasses.replace(sample, truth=_named(title, sample.truth))

    def _find(self, index: int) -> tuple[str, LaneDataset, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        title, samples = self._parts[number]
        return title, samples, index - int(self._starts[number])


def _named(title: str, truth: LaneTruth) -> LaneTruth:
    return dataclasses.replace(truth, name=f"{title}/{truth.name}", category=truth.category or title)
