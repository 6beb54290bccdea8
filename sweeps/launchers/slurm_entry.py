"""One job that Slurm was given: its starts as they were seen, and how it stands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sweeps.job import JobStatus, State
from sweeps.launchers.slurm_state import BY_SLURM, SlurmJob, held_seconds


@dataclass
class Entry:
    name: str
    """The job's."""
    id: str
    batch_name: str
    """Slurm's name of the batch that it is in."""
    submitted_utc: float
    settle_seconds: float
    """For which an end that Slurm brought is none."""
    latest: SlurmJob | None = None
    starts: list[SlurmJob] = field(default_factory=list)
    """In order; all but the last have ended."""
    ended_since: float | None = None
    """When an end was first seen."""
    missed_since: float | None = None
    is_lost: bool = False
    gave_up: str = ""
    """Why the launcher itself ended it."""
    num_releases: int = 0

    def see(self, job: SlurmJob, now: float) -> None:
        """What Slurm says now."""
        self.missed_since = None
        last = self.starts[-1] if self.starts else None
        if job.state == "COMPLETING" and (last is None or last.started != job.started):
            # Queued again while its nodes are still being cleared: the start that it tells of is one that is expected.
            job = replace(job, state="PENDING", started=None, nodes=())
        self.latest = job
        if job.started is None:
            if last is not None and last.ended is None and job.kind == "pending":
                self.starts[-1] = replace(last, ended=_end_before(last, job, now))
        elif last is not None and last.started == job.started:
            self.starts[-1] = job
        else:
            if last is not None and last.ended is None:
                self.starts[-1] = replace(last, ended=min(_end_before(last, job, now), job.started))
            self.starts.append(job)
        if job.kind != "ended":
            self.ended_since = None
        elif self.ended_since is None:
            self.ended_since = now

    def see_starts(self, starts: Sequence[SlurmJob], now: float) -> None:
        """What accounting says: every start, each with its own end."""
        ordered = sorted(starts, key=lambda job: (job.started or float("inf"), job.submitted or 0.0))
        # The database may lag: an end that was seen already is kept.
        seen = {start.started: start for start in self.starts if start.ended is not None}
        begun = [
            replace(job, ended=seen[job.started].ended) if job.ended is None and job.started in seen else job
            for job in ordered
            if job.started is not None
        ]
        if len(begun) >= len(self.starts):
            self.starts = begun
        latest = max(ordered, key=lambda job: (job.submitted or 0.0, job.started or 0.0))
        if self.latest is None or self.latest.kind != "ended" or self.missed_since is not None:
            self.see(latest, now)
        self.missed_since = None

    def miss(self, now: float, lost_seconds: float) -> None:
        """Nobody knows it."""
        if self.missed_since is None:
            self.missed_since = now
        self.is_lost = now - self.missed_since >= lost_seconds

    def missed_starts(self) -> bool:
        """It was started again while nobody looked, or its starts' ends are a guess."""
        return self.latest is not None and (self.latest.num_restarts > 0 or len(self.starts) > 1)

    def has_ended(self, now: float) -> bool:
        if self.is_lost:
            return True
        if self.latest is None or self.ended_since is None:
            return False
        return self.latest.state not in BY_SLURM or now - self.ended_since >= self.settle_seconds

    def last_nodes(self) -> tuple[str, ...]:
        return next((start.nodes for start in reversed(self.starts) if start.nodes), ())

    def status(self) -> JobStatus:
        now = time.time()
        last = self.starts[-1] if self.starts else None
        ended = self.has_ended(now)
        latest = self.latest
        restarts = latest.num_restarts if latest is not None else 0
        num_starts = max(len(self.starts), restarts + (1 if last is not None and last.ended is None else 0))
        state: State = "pending"
        if ended:
            state = "lost" if self.is_lost else "ended"
        elif latest is not None and latest.kind == "running":
            state = "running"
        return JobStatus(
            name=self.name,
            id=self.id,
            state=state,
            reason=self._reason(ended),
            exit_code=latest.exit_code if ended and latest is not None else None,
            nodes=last.nodes if last is not None else (),
            started_utc=last.started if last is not None else None,
            ended_utc=(last.ended if last is not None and last.ended is not None else now) if ended else None,
            allocated_seconds=held_seconds(self.starts, now),
            num_starts=num_starts,
        )

    def _reason(self, ended: bool) -> str:
        if self.gave_up:
            return self.gave_up
        if self.is_lost:
            return "Slurm does not know it any more"
        if self.latest is None:
            return ""
        if ended and self.latest.state in ("COMPLETED", "FAILED"):
            return f"exit code {self.latest.exit_code}"
        if self.latest.kind == "ended":
            return self.latest.state
        return self.latest.reason


def _end_before(start: SlurmJob, later: SlurmJob, now: float) -> float:
    """Of a start that Slurm has queued again: the time of that is the later one's submission."""
    begun = start.started or now
    return later.submitted if later.submitted is not None and later.submitted >= begun else now
