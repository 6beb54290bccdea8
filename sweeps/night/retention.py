"""What is kept on the disk: checkpoints that nothing will go on from are removed, the oldest first for a budget."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from perception.errors import UserError
from sweeps.night.champions import ENDED_WELL, best_known
from sweeps.night.night import find_nights
from sweeps.night.planned_jobs import planner
from sweeps.planning.plan import Retention
from sweeps.planning.plan_text import parse_plan
from sweeps.record import JobRecord, NightRecord


@dataclass(frozen=True)
class Kept:
    """The checkpoints of one job."""

    folder: Path
    """Its run folder."""
    num_bytes: int
    ended_utc: float
    is_protected: bool = False


@dataclass(frozen=True)
class Removal:
    """What was done, for a person."""

    num_jobs: int
    num_bytes: int
    kept_bytes: int
    problems: tuple[str, ...] = ()

    def line(self) -> str:
        return (
            f"retention: checkpoints of {self.num_jobs} jobs removed, {self.num_bytes / 2**30:.2f} GiB; "
            f"{self.kept_bytes / 2**30:.2f} GiB kept"
        )


def useless(jobs: Iterable[JobRecord], retention: Retention) -> list[Path]:
    """Run folders whose checkpoints go with the night: of pruned and failed jobs, and of scaling runs, which are cut
    short to measure and trained to nothing.
    """
    folders = []
    for job in jobs:
        failed = job.status not in (*ENDED_WELL, "pruned", "answered")
        goes = job.status == "pruned" or job.kind == "scaling" or (failed and not retention.keep_failed_checkpoints)
        if goes and job.run_folder:
            folders.append(Path(job.run_folder))
    return folders


def over_budget(kept: Sequence[Kept], budget_bytes: float) -> list[Kept]:
    """Which go so that the others fit: the oldest first, protected ones never. Nothing goes without a budget."""
    if not budget_bytes:
        return []
    total = sum(one.num_bytes for one in kept)
    going = []
    for one in sorted(kept, key=lambda one: (one.ended_utc, str(one.folder))):
        if total <= budget_bytes:
            break
        if not one.is_protected and one.num_bytes:
            going.append(one)
            total -= one.num_bytes
    return going


def protected_folders(root: Path, nights: Iterable[NightRecord], past: Sequence[JobRecord]) -> list[str]:
    """Run folders that are never touched: of the best configuration of each plan of this root, over all its nights and
    in its newest one, and of nights that have not ended.

    `nights` are in order of their begin.
    """
    folders = [str(job) for found in find_nights(root) if not found.is_closed for job in found.folder.jobs.glob("*")]
    for night in {night.plan: night for night in nights}.values():
        own = [job for job in past if job.plan == night.plan]
        try:
            plan = parse_plan(night.plan_text, f"plan of night {night.night}")
        except UserError:
            # Of another version, or of data that has gone: then whatever was picked in any of its nights.
            folders += [job.run_folder for job in own if job.kind == "champion"]
            continue
        newest = [job for job in own if job.night == night.night]
        for model in plan.models:
            comparable = planner(model, root / night.night / "jobs").is_comparable
            best = [best_known(own, model, plan.name, comparable), best_known(newest, model, plan.name)]
            hashes = {champion.config_hash for champion in best if champion is not None}
            folders += [job.run_folder for job in own if job.model == model.model and job.config_hash in hashes]
    return [folder for folder in folders if folder]


def apply_retention(
    root: Path, retention: Retention, jobs: Sequence[JobRecord], past: Iterable[JobRecord], protected: Iterable[str]
) -> Removal:
    """Of the night's `jobs`, then of all nights of the root; `protected`: run folders that are never touched.

    Checkpoints alone are removed: configuration, metrics and result stay, and the records keep their hashes.
    """
    untouched = {Path(folder) for folder in protected}
    problems: list[str] = []
    num_jobs = num_bytes = 0
    for folder in useless(jobs, retention):
        freed = 0 if folder in untouched else _remove(folder, problems)
        num_jobs, num_bytes = num_jobs + bool(freed), num_bytes + freed
    ended = {Path(job.run_folder): job.ended_utc or 0.0 for job in (*past, *jobs) if job.run_folder}
    kept = [
        Kept(folder, size, ended.get(folder, folder.stat().st_mtime), folder in untouched)
        for folder in sorted(path.absolute() for path in root.glob("*/jobs/*"))
        if (size := _size(folder))
    ]
    total = sum(one.num_bytes for one in kept)
    for one in over_budget(kept, retention.disk_gib * 2**30):
        freed = _remove(one.folder, problems)
        num_jobs, num_bytes, total = num_jobs + bool(freed), num_bytes + freed, total - freed
    if retention.disk_gib and total > retention.disk_gib * 2**30:
        problems.append(
            f"retention: {total / 2**30:.2f} GiB of checkpoints are champions' or of nights that run, more than "
            f"disk_gib = {retention.disk_gib:g}: raise it"
        )
    return Removal(num_jobs, num_bytes, total, tuple(problems))


def _files(folder: Path) -> list[Path]:
    return [*folder.glob("checkpoints/step-*"), *folder.glob("checkpoints/.step-*")]


def _size(folder: Path) -> int:
    total = 0
    for path in _files(folder):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _remove(folder: Path, problems: list[str]) -> int:
    """Bytes that were freed."""
    freed = 0
    for path in _files(folder):
        try:
            size = path.stat().st_size
            path.unlink()
            freed += size
        except OSError as error:
            problems.append(f"{path}: cannot be removed ({error.strerror})")
    return freed
