"""Jobs on the slots of this host, each under a small keeper process, so that they outlive the controller.

A folder holds two files a job: NAME.job.json, what was submitted, and NAME.run.json, what became of it, which the
keeper writes. NAME.lock is held by the keeper for as long as it lives: whoever can take it knows that the job is over.
With it the keeper holds the job's seats of this host, so that several controllers start no more than there is room for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perception.errors import UserError
from perception.run_folder import write_json
from sweeps.job import Job, JobStatus
from sweeps.launchers.container_argv import local_container_argv
from sweeps.launchers.host_claims import HOST_FOLDER, Claims
from sweeps.launchers.host_slots import describe_host, host_slots, slot_cores, slot_environment
from sweeps.launchers.launcher import LauncherError, inherited_environment
from sweeps.launchers.local_keeper import start_time
from sweeps.launchers.placement import Waiting, place

KEEPER = Path(__file__).with_name("local_keeper.py")
KEEPER_START_SECONDS = 5.0
MAX_SPAWNS = 3
"""Keepers that end before they could record themselves (a full disk): then the job is given up."""


@dataclass
class _Entry:
    """One job, as far as this launcher knows."""

    job: Job
    order: int
    submitted_utc: float
    cwd: str
    slots: tuple[int, ...] = ()
    """Held now; empty: it waits or has ended."""
    keeper: tuple[int, int] | None = None
    """Process id and start time."""
    child: int | None = None
    """The keeper's process id, where this process started it and has to bury it."""
    started_utc: float | None = None
    num_spawns: int = 0
    waits_for: str = ""
    """Said once it was so, and until it starts: a reason that came and went would fill a journal."""
    cancelled: bool = False
    told_to_end: bool = False
    """Its keeper was, after it was cancelled."""
    ended: JobStatus | None = None


class LocalLauncher:
    """Slots of this host. Jobs of several nodes run here too, with as many ranks, where there are so many slots."""

    name = "local"

    def __init__(
        self,
        slots: int,
        folder: Path,
        grace_seconds: float = 60.0,
        reserve_after_seconds: float = 600.0,
        host_folder: Path | None = None,
        secret_variables: Collection[str] = (),
    ) -> None:
        """`slots` 0: one a GPU, or else one a core. `folder`: kept for as long as its jobs are of interest.

        `grace_seconds`: from SIGTERM to SIGKILL. `reserve_after_seconds`: a job that has waited so long is not passed
        over by smaller ones any more. `host_folder`: of the seats that all controllers on this host share; None: as
        everybody. `secret_variables`: of the environment, not for jobs.
        """
        self._slots = host_slots(slots, os.environ)
        self._folder = folder.absolute()
        self._grace_seconds = grace_seconds
        self._reserve_after_seconds = reserve_after_seconds
        self._secret_variables = frozenset(secret_variables)
        self._claims = Claims(host_folder or HOST_FOLDER, [slot.seats for slot in self._slots])
        self._host = socket.gethostname()
        self._entries: dict[str, _Entry] = {}
        self._live: dict[str, _Entry] = {}
        """Those of the entries that wait or run."""
        self._ended: dict[str, JobStatus] = {}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder}: cannot be made ({error.strerror}); give another --root") from None

    def num_slots(self) -> int:
        return len(self._slots)

    def num_nodes(self) -> int:
        return 1

    def hardware(self) -> str:
        return describe_host(self._slots)

    def submit(self, job: Job) -> str:
        return self.submit_many([job])[0]

    def submit_many(self, jobs: Sequence[Job]) -> list[str]:
        for job in jobs:
            self._check(job)
        for job in jobs:
            if job.name in self._entries:
                continue
            if self._file(job.name, "job").exists():
                self._load(job.name)
                continue
            entry = _Entry(job, len(self._entries), time.time(), str(Path.cwd()))
            write_json(self._file(job.name, "job"), _to_json(entry))
            self._add(entry)
        self._start_waiting()
        return [self._id(self._entries[job.name]) for job in jobs]

    def poll(self) -> dict[str, JobStatus]:
        for entry in list(self._live.values()):
            if entry.slots:
                self._look_after(entry)
        self._start_waiting()
        return {**self._ended, **{name: self._status(entry) for name, entry in self._live.items()}}

    def cancel(self, name: str) -> None:
        entry = self._live.get(name)
        if entry is None:
            return
        entry.cancelled = True
        if entry.slots:
            self._signal_keeper(entry)
            return
        ended = {"slots": [], "ended_utc": time.time(), "exit_code": None, "reason": "CANCELLED"}
        write_json(self._file(name, "run"), ended)
        self._end(entry, ended)

    def adopt(self, prefix: str) -> dict[str, JobStatus]:
        for path in sorted(self._folder.glob("*.job.json")):
            name = path.name.removesuffix(".job.json")
            if name.startswith(prefix) and name not in self._entries:
                self._load(name)
        statuses = self.poll()
        return {name: status for name, status in statuses.items() if name.startswith(prefix)}

    def exclude(self, nodes: Sequence[str]) -> None:
        """There is one node only: without it nothing could run, so nothing is done."""

    def close(self) -> None:
        """Keepers and their jobs go on."""
        self._claims.settle(keep=False)

    # One job

    def _check(self, job: Job) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", job.name):
            raise UserError(f'job name "{job.name}": must be of letters, digits, dots and dashes')
        if not job.argv:
            raise UserError(f"job {job.name}: argv is empty; give a command")
        if job.num_ranks > len(self._slots):
            raise UserError(
                f"job {job.name}: needs {job.num_ranks} slots, but this host has {len(self._slots)}: take fewer ranks"
            )

    def _file(self, name: str, kind: str) -> Path:
        return self._folder / f"{name}.{kind}.json"

    def _add(self, entry: _Entry) -> None:
        self._entries[entry.job.name] = entry
        self._live[entry.job.name] = entry

    def _load(self, name: str) -> None:
        """Of an earlier launcher: what was submitted, and what became of it."""
        path = self._file(name, "job")
        entry = _from_json(path, len(self._entries))
        self._add(entry)
        record = self._record(name)
        deadline = time.monotonic() + KEEPER_START_SECONDS
        while "keeper" not in record and not self._lock_is_free(name) and time.monotonic() < deadline:
            # Its keeper was started a moment ago, by a controller that died right after.
            time.sleep(0.01)
            record = self._record(name)
        if "ended_utc" in record:
            self._end(entry, record)
        elif "keeper" in record or not self._lock_is_free(name):
            entry.slots = tuple(record["slots"])
            entry.started_utc = record.get("started_utc", time.time())
            if "keeper" in record:
                entry.keeper = (record["keeper"][0], record["keeper"][1])
            self._look_after(entry)

    def _start_waiting(self) -> None:
        waiting = {name: entry for name, entry in self._live.items() if not entry.slots}
        busy = {slot for entry in self._live.values() for slot in entry.slots}
        is_overdue = False
        try:
            free = self._claims.take(set(range(len(self._slots))) - busy) if waiting else []
            if len(busy) + len(free) < len(self._slots):
                for entry in waiting.values():
                    entry.waits_for = "other controllers on this host hold slots"
            now = time.time()
            queue = [
                Waiting(name, entry.job.num_ranks, entry.job.priority, entry.order, now - entry.submitted_utc)
                for name, entry in waiting.items()
            ]
            for name, slots in place(queue, free, self._reserve_after_seconds):
                self._start(waiting[name], slots, self._claims.locks(slots))
                self._claims.hand_over(slots)
            is_overdue = any(
                job.waited_seconds >= self._reserve_after_seconds and not waiting[job.name].slots for job in queue
            )
        finally:
            self._claims.settle(keep=is_overdue)

    def _start(self, entry: _Entry, slots: tuple[int, ...], locks: Sequence[int]) -> None:
        """`locks` of its seats, for the keeper to inherit."""
        job = entry.job
        try:
            job.run_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{job.run_folder}: cannot be made ({error.strerror}); give another --root") from None
        write_json(self._file(job.name, "run"), {"slots": list(slots)})
        lock = self._try_lock(job.name)
        if lock is None:
            raise UserError(f"{self._folder}: job {job.name} is run by another controller: end that one first")
        mine = [self._slots[slot] for slot in slots]
        told = {**slot_environment(mine, os.environ), **job.environment}
        argv = [*job.argv, *(["--ranks", str(job.num_ranks)] if job.starts_ranks else [])]
        if job.image:
            has_gpus = any(slot.gpu for slot in mine)
            argv = local_container_argv(job, argv, [name for name in told if name != "CUDA_VISIBLE_DEVICES"], has_gpus)
        keeper = [sys.executable, "-I", "-S", str(KEEPER), str(self._file(job.name, "run"))]
        keeper += [str(job.run_folder / "job.log"), entry.cwd, str(job.time_limit_seconds), str(self._grace_seconds)]
        keeper += [",".join(str(core) for core in slot_cores(mine)), *argv]
        try:
            inherited = inherited_environment(os.environ, self._secret_variables)
            process_id = _spawn(keeper, {**inherited, **told}, [lock, *locks])
        except OSError as error:
            raise LauncherError(f"job {job.name}: no process can be started now ({error.strerror})") from error
        finally:
            os.close(lock)
        entry.slots, entry.started_utc, entry.child = slots, time.time(), process_id
        entry.num_spawns += 1
        with contextlib.suppress(OSError):
            entry.keeper = (process_id, start_time(process_id))

    def _look_after(self, entry: _Entry) -> None:
        """Of a job that has slots: see whether it has ended."""
        name = entry.job.name
        if entry.child is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(entry.child, os.WNOHANG)
        if not self._lock_is_free(name):
            if entry.cancelled and not entry.told_to_end:
                self._signal_keeper(entry)
            return
        record = self._record(name)
        if "ended_utc" in record:
            self._end(entry, record)
        elif "keeper" in record:
            # The job died with its keeper; no record of how.
            lost = {**record, "ended_utc": time.time(), "exit_code": None, "reason": "its keeper was killed"}
            self._end(entry, lost, is_lost=True)
        elif entry.cancelled or entry.num_spawns >= MAX_SPAWNS:
            reason = "CANCELLED" if entry.cancelled else f"{self._file(name, 'run')}: cannot be written by the keeper"
            self._end(entry, {**record, "ended_utc": time.time(), "exit_code": None, "reason": reason})
        else:
            entry.slots, entry.keeper, entry.child, entry.started_utc = (), None, None, None

    def _end(self, entry: _Entry, record: Mapping[str, Any], is_lost: bool = False) -> None:
        started = record.get("started_utc")
        ended = record["ended_utc"]
        if "keeper" in record:
            entry.keeper = (record["keeper"][0], record["keeper"][1])
        entry.ended = JobStatus(
            name=entry.job.name,
            id=self._id(entry),
            state="lost" if is_lost else "ended",
            reason=record["reason"],
            exit_code=record["exit_code"],
            nodes=(self._host,) if started is not None else (),
            started_utc=started,
            ended_utc=ended,
            allocated_seconds=max(0.0, ended - started) if started is not None else 0.0,
            num_starts=1 if started is not None else 0,
        )
        entry.slots = ()
        self._ended[entry.job.name] = entry.ended
        del self._live[entry.job.name]

    def _status(self, entry: _Entry) -> JobStatus:
        if not entry.slots or entry.started_utc is None:
            return JobStatus(entry.job.name, self._id(entry), "pending", entry.waits_for)
        return JobStatus(
            name=entry.job.name,
            id=self._id(entry),
            state="running",
            nodes=(self._host,),
            started_utc=entry.started_utc,
            allocated_seconds=max(0.0, time.time() - entry.started_utc),
            num_starts=1,
        )

    def _id(self, entry: _Entry) -> str:
        return f"{entry.keeper[0]}@{entry.keeper[1]}" if entry.keeper is not None else "waiting"

    def _signal_keeper(self, entry: _Entry) -> None:
        """SIGTERM to exactly the process that was started as the keeper, never to one that got its number later."""
        keeper = entry.keeper
        if keeper is None:
            recorded = self._record(entry.job.name).get("keeper")
            if recorded is None:
                return
            keeper = entry.keeper = (recorded[0], recorded[1])
        try:
            handle = os.pidfd_open(keeper[0])
        except ProcessLookupError:
            return
        try:
            if start_time(keeper[0]) == keeper[1]:
                signal.pidfd_send_signal(handle, signal.SIGTERM)
                entry.told_to_end = True
        except (OSError, ValueError):
            pass  # It ended at this moment.
        finally:
            os.close(handle)

    def _record(self, name: str) -> dict[str, Any]:
        path = self._file(name, "run")
        try:
            return dict(json.loads(path.read_text()))
        except FileNotFoundError:
            return {}
        except ValueError:
            raise UserError(f"{path}: is damaged; remove it and {name}.job.json, and the job is run again") from None

    def _try_lock(self, name: str) -> int | None:
        """An open, locked file; None while a keeper holds it."""
        handle = os.open(self._folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        return handle

    def _lock_is_free(self, name: str) -> bool:
        handle = self._try_lock(name)
        if handle is None:
            return False
        os.close(handle)
        return True


def _spawn(argv: Sequence[str], environment: Mapping[str, str], locks: Sequence[int]) -> int:
    """Start a keeper in a session of its own, with the open locks, and SIGTERM blocked until it is ready.

    No subprocess.Popen: the keeper is to outlive whoever started it, and so belongs to none.
    """
    opened = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
    return os.posix_spawn(
        argv[0],
        list(argv),
        environment,
        # Duplicated onto itself a file stays open in the new program.
        file_actions=[*opened, *((os.POSIX_SPAWN_DUP2, lock, lock) for lock in locks)],
        setsid=True,
        setsigmask=[signal.SIGTERM],
        setsigdef=[signal.SIGINT, signal.SIGHUP, signal.SIGPIPE],
    )


def _to_json(entry: _Entry) -> dict[str, Any]:
    job = {**dataclasses.asdict(entry.job), "run_folder": str(entry.job.run_folder)}
    return {"job": job, "submitted_utc": entry.submitted_utc, "cwd": entry.cwd}


def _from_json(path: Path, order: int) -> _Entry:
    try:
        content = json.loads(path.read_text())
        return _Entry(job_from_json(content["job"]), order, content["submitted_utc"], content["cwd"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path}: is no job as this version writes them ({error}); remove it to forget the job"
        ) from None


def job_from_json(values: Mapping[str, Any]) -> Job:
    """Of `dataclasses.asdict`, through JSON."""
    tuples = {name: tuple(values[name]) for name in ("argv", "excluded_nodes")}
    return Job(**{**values, **tuples, "run_folder": Path(values["run_folder"])})
