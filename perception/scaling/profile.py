"""One rank's training step as it was recorded: how long each part takes, and when each gradient is ready.

The file is JSON with the fields of `StepProfile`; times in seconds, sizes in bytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perception.errors import UserError, nearest
from perception.run_folder import write_json

_MOST_SECONDS = 1e6
_CURE = "record it anew by `python -m pipelines bench record`"


@dataclass(frozen=True)
class GradientReady:
    name: str
    numel: int
    element_bytes: int
    ready_seconds: float
    """Since the start of backward."""

    @property
    def num_bytes(self) -> int:
        return self.numel * self.element_bytes


@dataclass(frozen=True)
class StepProfile:
    """A step of one process alone; nothing of it is spent in communication."""

    model: str
    device: str
    precision: str
    batch_size_per_rank: int
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    gradients: tuple[GradientReady, ...]
    """In order of readiness."""

    @property
    def step_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds + self.optimizer_seconds

    @property
    def images_per_second(self) -> float:
        return self.batch_size_per_rank / self.step_seconds

    @property
    def gradient_bytes(self) -> int:
        return sum(gradient.num_bytes for gradient in self.gradients)


def scaled(profile: StepProfile, images_per_second: float, device: str) -> StepProfile:
    """The same shape of a step, stretched so that one rank of `device` reaches `images_per_second`."""
    if not (math.isfinite(images_per_second) and images_per_second > 0):
        raise UserError(f"images per second must be a positive number, not {images_per_second}")
    factor = profile.images_per_second / images_per_second
    return dataclasses.replace(
        profile,
        device=device,
        forward_seconds=profile.forward_seconds * factor,
        backward_seconds=profile.backward_seconds * factor,
        optimizer_seconds=profile.optimizer_seconds * factor,
        gradients=tuple(
            dataclasses.replace(gradient, ready_seconds=gradient.ready_seconds * factor)
            for gradient in profile.gradients
        ),
    )


def write_profile(path: Path, profile: StepProfile) -> None:
    """Write JSON, whole or not at all. Raises UserError where the file cannot be written."""
    write_json(path, dataclasses.asdict(profile))


def read_profile(path: Path) -> StepProfile:
    """Read what `write_profile` wrote. Raises UserError, naming the file and the field, on anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {_CURE}") from None
    except (ValueError, RecursionError) as error:  # not JSON, or not text at all, or nested without end
        raise UserError(f"{path}: not JSON ({error}); {_CURE}") from None
    fields = _checked_fields(f"{path}", content, StepProfile)
    gradients = fields["gradients"]
    if not isinstance(gradients, list) or not gradients:
        raise UserError(f"{path}: gradients: a non-empty list is needed; {_CURE}")
    ready = tuple(_read_gradient(f"{path}: gradients[{index}]", value) for index, value in enumerate(gradients))
    profile = StepProfile(
        model=_text(f"{path}: model", fields["model"]),
        device=_text(f"{path}: device", fields["device"]),
        precision=_text(f"{path}: precision", fields["precision"]),
        batch_size_per_rank=_count(f"{path}: batch_size_per_rank", fields["batch_size_per_rank"], at_least=1),
        forward_seconds=_seconds(f"{path}: forward_seconds", fields["forward_seconds"]),
        backward_seconds=_seconds(f"{path}: backward_seconds", fields["backward_seconds"]),
        optimizer_seconds=_seconds(f"{path}: optimizer_seconds", fields["optimizer_seconds"]),
        gradients=ready,
    )
    _check_order(path, profile)
    return profile


def _read_gradient(place: str, content: Any) -> GradientReady:
    fields = _checked_fields(place, content, GradientReady)
    return GradientReady(
        name=_text(f"{place}.name", fields["name"]),
        numel=_count(f"{place}.numel", fields["numel"], at_least=0),
        element_bytes=_count(f"{place}.element_bytes", fields["element_bytes"], at_least=1),
        ready_seconds=_seconds(f"{place}.ready_seconds", fields["ready_seconds"]),
    )


def _check_order(path: Path, profile: StepProfile) -> None:
    if profile.step_seconds <= 0:
        raise UserError(f"{path}: forward, backward and optimizer_seconds are all 0; {_CURE}")
    names = [gradient.name for gradient in profile.gradients]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{path}: gradients: {twice} is there twice; {_CURE}")
    previous = 0.0
    for index, gradient in enumerate(profile.gradients):
        if gradient.ready_seconds < previous:
            raise UserError(f"{path}: gradients[{index}].ready_seconds: earlier than the one before; {_CURE}")
        previous = gradient.ready_seconds
    if previous > profile.backward_seconds:
        raise UserError(f"{path}: backward_seconds: the last gradient is ready later, at {previous}; {_CURE}")


def _checked_fields(place: str, content: Any, form: type) -> Mapping[str, Any]:
    if not isinstance(content, dict):
        raise UserError(f"{place}: a JSON object is needed; {_CURE}")
    needed = [field.name for field in dataclasses.fields(form)]
    for name in needed:
        if name not in content:
            raise UserError(f"{place}: {name} is missing; {_CURE}")
    for name in content:
        if name not in needed:
            raise UserError(f"{place}: {name} is no field of it{nearest(name, needed)}")
    return content


def _text(place: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise UserError(f"{place}: a name is needed, not {value!r}; {_CURE}")
    return value


def _count(place: str, value: Any, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise UserError(f"{place}: a whole number of at least {at_least} is needed, not {value!r}; {_CURE}")
    return value


def _seconds(place: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared before it is converted: JSON's whole numbers may be larger than any float.
    if not number or not 0 <= value < _MOST_SECONDS:
        raise UserError(f"{place}: a time in seconds is needed, not {str(value)[:40]}; {_CURE}")
    return float(value)
