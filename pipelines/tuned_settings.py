"""Settings of the all-reduce layer that `tune` found, in a file for each model and machine, and laid over a config."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perception.config import RunConfig, override
from perception.cores import available_cores
from perception.distributed.environment import RankEnvironment
from perception.errors import UserError
from perception.run_folder import gpu_names, package_versions, processor_name

Value = str | int | float
PLACEMENT = ("distributed.engine", "distributed.transport")
"""They belong together, and to whoever starts the ranks."""
FIELDS = (
    *PLACEMENT,
    "distributed.local_reduction",
    "distributed.first_bucket_mib",
    "distributed.bucket_mib",
    "distributed.horovod_cycle_time_milliseconds",
    "distributed.wire_format",
    "train.num_threads_per_rank",
)
"""What `tune` searches, and all that a file of it may set."""


@dataclass(frozen=True)
class Key:
    """What settings were measured for; elsewhere others may be best."""

    model: str
    num_parameters: int
    input_size: tuple[int, int]
    """(height, width)."""
    processor: str
    num_cores: int
    """That a process may use."""
    gpus: tuple[str, ...]
    num_hosts: int
    torch: str | None
    horovod: str | None
    ranks: int

    @property
    def file_name(self) -> str:
        digest = hashlib.sha256(json.dumps(dataclasses.asdict(self)).encode()).hexdigest()
        return f"{_file_stem(self.model)}-{digest[:12]}.json"


@dataclass(frozen=True)
class Tuned:
    """What a file says."""

    path: Path
    key: dict[str, Any]
    settings: dict[str, Value]
    reason: str
    date: str


def key_of(config: RunConfig, ranks: int, num_hosts: int) -> Key:
    """The key of `ranks` ranks on hosts like this one. Imports torch, to count parameters."""
    import torch

    from perception.tasks import task_for

    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in task_for(config).build_model().parameters())
    versions = package_versions()
    return Key(
        model=config.name,
        num_parameters=num_parameters,
        input_size=(config.model.input_height, config.model.input_width),
        processor=processor_name(),
        num_cores=available_cores(),
        gpus=tuple(gpu_names()),
        num_hosts=num_hosts,
        torch=versions["torch"],
        horovod=versions["horovod"],
        ranks=ranks,
    )


def default_folder() -> Path:
    from perception.data.sources import user_cache

    return user_cache() / "tuned"


def read_tuned(path: Path) -> Tuned:
    """Raises UserError for a file that `tune` did not write."""
    cure = "delete it, or write it anew by `python -m pipelines tune`"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as tuned settings ({error}); {cure}") from None
    fields = raw if isinstance(raw, dict) else {}
    for name, kind in (("key", dict), ("settings", dict), ("reason", str), ("date", str)):
        if not isinstance(fields.get(name), kind):
            raise UserError(f"{path}: field {name} is missing or of another type; {cure}")
    for name, value in fields["settings"].items():
        if name not in FIELDS or isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise UserError(f"{path}: settings.{name} = {value!r} is nothing that tune sets; {cure}")
    return Tuned(path, fields["key"], fields["settings"], fields["reason"], fields["date"])


def differences(key: Key, other: Mapping[str, Any]) -> list[str]:
    """Where a file's key is another, in words."""
    own = json.loads(json.dumps(dataclasses.asdict(key)))
    return [
        f"{name} {_shown(other.get(name))} there, {_shown(value)} here"
        for name, value in own.items()
        if other.get(name) != value
    ]


def find_tuned(key: Key, file: Path | None) -> tuple[Tuned | None, str]:
    """Settings for exactly this key, of `file` or of the user's cache folder; or None and why in one line."""
    make = f"make them: python -m pipelines tune {key.model} --ranks {key.ranks}"
    exact = file or default_folder() / key.file_name
    if file is not None and not file.is_file():
        raise UserError(f"--tuned-from {file}: no such file; {make} --out {file}")
    if exact.is_file():
        others = [read_tuned(exact)]
    else:
        others = [read_tuned(path) for path in sorted(exact.parent.glob(f"{_file_stem(key.model)}-*.json"))]
        others = [other for other in others if other.key.get("model") == key.model]
    if not others:
        return None, f"tuned settings: none taken, {exact.parent} has none of {key.model}; {make}"
    nearest = min(others, key=lambda other: len(differences(key, other.key)))
    apart = differences(key, nearest.key)
    if apart:
        return None, f"tuned settings: none taken, {nearest.path} is of another case ({'; '.join(apart)}); {make}"
    return nearest, ""


def tuned_assignments(
    options: argparse.Namespace, config: RunConfig, place: RankEnvironment, ranks: int
) -> tuple[list[str], str]:
    """What of a tuned file goes before the user's --set, as name=value, and the line that says so.

    `config` is the run's without it. What the user set is left out, and so are engine and transport if the user
    chose one of them or another launcher started the ranks. Raises UserError for a bad file.
    """
    if options.resume:
        return [], "tuned settings: none taken, the run goes on with the settings that it has"
    if max(ranks, place.size) == 1:
        return [], "tuned settings: none taken, one rank reduces nothing"
    tuned, line = find_tuned(key_of(config, max(ranks, place.size), place.num_nodes), options.tuned_from)
    if tuned is None:
        return [], line
    own = {text.partition("=")[0].strip() for text in options.set}
    if options.engine is not None or place.size > 1 or own & set(PLACEMENT):
        own |= set(PLACEMENT)
    taken = {name: value for name, value in tuned.settings.items() if name not in own}
    assignments = as_assignments(taken)
    try:
        override(config, assignments)
    except UserError as error:
        raise UserError(f"{tuned.path}: {error}") from None
    shown = ", ".join(assignments) or ("none, others were chosen" if tuned.settings else "the defaults")
    left = [name for name in tuned.settings if name in own]
    beside = f"; not {', '.join(left)}, chosen otherwise" if left and taken else ""
    return assignments, f"tuned settings: {shown}{beside}; {tuned.reason} ({tuned.path}, {tuned.date})"


def as_assignments(settings: Mapping[str, Value]) -> list[str]:
    """As --set takes them."""
    return [f"{name}={value}" for name, value in settings.items()]


def _file_stem(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "-", model).strip("-.") or "model"


def _shown(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "x".join(str(item) for item in value) or "none"
    return "none" if value is None else str(value)
