"""The controller of one night: fills free slots, reads results, tells the search, and writes all of it down first.

Its state is the fold of the night's journal: every step appends events, then applies them. It can be killed anywhere
and started again: it takes over the jobs that run, and looks for those whose submission was announced only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time

from perception.run_folder import write_json
from sweeps.job import JobStatus
from sweeps.launchers.launcher import LauncherError
from sweeps.night.clock import StopSignals, cpu_seconds
from sweeps.night.early_ending import why_search_ends
from sweeps.night.events import (
    CancelAsked,
    ClosingBegun,
    ControllerStarted,
    Event,
    JobConcluded,
    Measured,
    ModelDone,
    NodeExcluded,
    Noted,
    StopOrdered,
    TwinFailed,
)
from sweeps.night.filling import Filler
from sweeps.night.ingest import answered_record, make_record, read_result
from sweeps.night.leaving import leave
from sweeps.night.planned import add_trial, plan_repeats
from sweeps.night.planned_jobs import is_of_night, run_folder_of
from sweeps.night.run import NightRun
from sweeps.night.settling import Classify, Settling, differs, settle, status_seen
from sweeps.night.state import SUCCESSES, JobState
from sweeps.record import JobRecord

CONTROL_FILE = "control.json"
LEAST_INTERVAL_SECONDS, MOST_INTERVAL_SECONDS = 0.2, 10.0
IDLE_SHARE = 0.01
"""Of a job's time: a slot that falls free waits about half as long for its next job."""
RETRY_SECONDS = 3.0
"""After a launcher did not answer."""
CPU_SHARE = 0.03
"""Of one core, what looking after the jobs may take, and of the time a third: with more jobs it is done less often."""
MOST_SECONDS_TO_END = 900.0
"""After jobs were asked to end; then what still holds slots is given up, and said."""
SLOTS_VALID_SECONDS = 20.0
PROGRESS_SECONDS = 600.0


class Controller:
    def __init__(self, run: NightRun, classify: Classify, stop: StopSignals) -> None:
        self._run = run
        self._settling = Settling(run.night, run.plan.retries, classify)
        self._stop = stop
        self._filler = Filler(run)
        self._cancelled: set[str] = set()
        """Attempts that the launcher was asked to cancel by this process."""
        self._closing_since: float | None = None
        self._slots = (0.0, 0)
        self._repeats_planned = False
        self._progress_utc = run.clock.now()
        self._cpu_at_start = cpu_seconds()

    @property
    def cpu_seconds(self) -> float:
        """Of this controller, in this process."""
        return cpu_seconds() - self._cpu_at_start

    def drive(self) -> bool:
        """Until the night has ended (True), or a signal stopped it (False): then jobs go on, and another takes over."""
        self._begin()
        interval = LEAST_INTERVAL_SECONDS
        while True:
            if self._stop.cause:
                leave(self._run, self._stop, self.cpu_seconds)
                return False
            began_cpu, began = cpu_seconds(), time.monotonic()
            changed = self.turn()
            if self._is_over():
                return True
            self._say_progress()
            interval = LEAST_INTERVAL_SECONDS if changed else min(self._most_interval(), interval * 1.2)
            # Many jobs take longer to look after: this keeps the share of a core that it takes.
            least = max((cpu_seconds() - began_cpu) / CPU_SHARE, 2 * (time.monotonic() - began))
            self._run.clock.wait(min(MOST_INTERVAL_SECONDS, max(interval, least)))

    def _say_progress(self) -> None:
        """Now and then, so that a log shows that the night is looked after."""
        run = self._run
        now = run.clock.now()
        if now - self._progress_utc >= PROGRESS_SECONDS:
            self._progress_utc = now
            running = sum(job.is_running for job in run.state.out.values())
            done = len(run.state.jobs) - len(run.state.out) - run.state.num_waiting - run.state.num_twins
            used = run.spent().rank_seconds / 3600
            run.say(f"{running} jobs running, {len(run.state.out)} submitted, {done} done; {used:.2f} rank-hours used")

    def _most_interval(self) -> float:
        seconds = self._run.mean_seconds()
        return 1.0 if seconds is None else min(MOST_INTERVAL_SECONDS, max(0.5, IDLE_SHARE * seconds))

    def turn(self) -> bool:
        """Look at everything once; True if anything was new."""
        run = self._run
        size = run.journal.size
        if not self._poll():
            return False
        now = run.clock.now()
        self._check_limits(now)
        self._cancel_asked()
        self._filler.confirm()
        self._filler.confirm_best()
        slots = self._num_slots(now)
        if slots and not self._repeats_planned and not run.state.closing:
            plan_repeats(run, slots)
            self._repeats_planned = True
        started = self._filler.fill(slots)
        idle = not (started or run.state.closing or run.state.out or run.state.twins)
        if idle and slots and self._filler.all_confirmed():
            self._close(self._why_nothing_is_left(), cancel=False)
        self._drop_what_waits()
        return run.journal.size > size

    def _begin(self) -> None:
        run = self._run
        run.record(ControllerStarted(run.clock.now(), os.getpid(), socket.gethostname()))
        if run.state.num_controller_starts > 1:
            run.say(f"goes on as controller {run.state.num_controller_starts} of this night")
        for job in run.state.jobs.values():
            run.trials[job.planned.model].learn(job)
        self._adopt()
        self._reconcile_trials()
        if run.state.excluded_nodes:
            run.launcher.exclude(sorted(run.state.excluded_nodes))
        for job in list(run.state.out.values()):
            if job.stop_cause:
                self._write_control(job)
        self._answer_twins()

    def _adopt(self) -> None:
        """Make the launcher know again what an earlier controller gave it; unconfirmed jobs are looked for later."""
        run = self._run
        while True:
            try:
                adopted = run.launcher.adopt(f"{run.night.night}.")
                break
            except LauncherError as error:
                self._filler.say_trouble(str(error))
                if self._stop.cause:
                    return
                run.clock.wait(RETRY_SECONDS)
        if run.state.num_controller_starts > 1:
            running = sum(status.state == "running" for status in adopted.values())
            run.say(f"took over {len(adopted)} jobs of an earlier controller, {running} of them running")
        names = {attempt.name for job in run.state.jobs.values() for attempt in job.attempts}
        for name in sorted(name for name in set(adopted) - names if is_of_night(name, run.night.night)):
            run.record(Noted(run.clock.now(), f"job {name} is with the launcher, and not in the journal: cancelled"))
            with contextlib.suppress(LauncherError):
                run.launcher.cancel(name)

    def _reconcile_trials(self) -> None:
        """The search and the journal were written one after the other: make up for what a kill left between them."""
        run = self._run
        for model, trials in run.trials.items():
            known = {
                job.planned.trial: job
                for job in run.state.jobs.values()
                if job.planned.model == model and job.planned.kind == "trial"
            }
            for suggestion in trials.search.running():
                job = known.get(suggestion.number)
                names = {parameter.name for parameter in trials.plan.space.parameters}
                if job is None and set(suggestion.parameters) != names:
                    run.say(f"{model}: trial {suggestion.number} was begun without all of its values: ended as failed")
                    trials.search.tell(suggestion.number, None, "failed")
                elif job is None:
                    # Asked for, and never written down: it is run all the same.
                    job = add_trial(run, model, suggestion.number, dict(suggestion.parameters))
                elif job.record is not None:
                    self._tell(job)

    def _poll(self) -> bool:
        """Take in how the jobs stand; False if the launcher does not answer."""
        run = self._run
        try:
            statuses = run.launcher.poll()
        except LauncherError as error:
            self._filler.say_trouble(str(error))
            return False
        self._filler.trouble_is_over()
        now = run.clock.now()
        seen: list[Event] = []
        ended: list[tuple[JobState, JobStatus]] = []
        for job in run.state.out.values():
            attempt = job.live
            assert attempt is not None
            if attempt.id is None:
                continue
            earlier = run.latest.get(job.name, attempt.status)
            status = statuses.get(attempt.name) or JobStatus(attempt.name, attempt.id, "lost")
            if status.state == "lost" and earlier is not None:
                status = _with_account(status, earlier)
            if differs(attempt.status, status):
                seen.append(status_seen(job, earlier, status, run_folder_of(job.planned), now))
            run.latest[job.name] = status
            if status.state in ("ended", "lost"):
                ended.append((job, status))
        run.record(*seen)
        self._measure()
        for job, status in ended:
            self._settle(job, status, now)
        if ended:
            self._answer_twins()
        return True

    def _measure(self) -> None:
        """Evaluations of trials go to the search; a trial that is not worth its slot is told to stop."""
        run = self._run
        for job in run.state.out.values():
            status = run.latest.get(job.name)
            if status is None or status.state == "pending":
                continue
            trials = run.trials[job.planned.model]
            for samples, value in trials.measured(job):
                run.record(Measured(run.clock.now(), job.name, samples, value))
                decision = trials.report(job, samples, value)
                if decision.stop and not job.stop_cause and status.state == "running":
                    run.record(StopOrdered(run.clock.now(), job.name, decision.cause))
                    self._write_control(job)

    def _write_control(self, job: JobState) -> None:
        """The order that all ranks of a run obey after the same step."""
        write_json(run_folder_of(job.planned) / CONTROL_FILE, {"stop": "pruned", "cause": job.stop_cause})

    def _settle(self, job: JobState, status: JobStatus, now: float) -> None:
        run = self._run
        run.latest.pop(job.name, None)
        events = settle(self._settling, run.model(job), job, status, run_folder_of(job.planned), now)
        new_nodes = [e.node for e in events if isinstance(e, NodeExcluded) and e.node not in run.state.excluded_nodes]
        run.record(*events)
        for node in new_nodes:
            run.launcher.exclude([node])
            run.say(f"node {node} is excluded: {run.state.excluded_nodes[node]}")
        if job.record is not None:
            self._after_conclusion(job, job.record)
        else:
            ended = job.attempts[-1].ended
            assert ended is not None
            run.say(f"{job.name}: attempt {ended.attempt} ended: {ended.signature or ended.failure}; {ended.action}")

    def _after_conclusion(self, job: JobState, record: JobRecord) -> None:
        run = self._run
        run.learn_duration(job, record)
        self._tell(job)
        value = f" {record.objective_name} {record.objective:.4g}" if record.objective is not None else ""
        cause = f": {record.cause}" if record.cause else ""
        run.say(f"{job.name}: {record.kind} {record.status}{value}{cause}")
        alike = max(run.state.first_failures.values(), default=0)
        if not run.state.closing and not run.state.num_results and alike >= run.plan.retries.give_up_after:
            signature = max(run.state.first_failures, key=lambda name: run.state.first_failures[name])
            self._close(f"{alike} jobs failed alike before any succeeded: {signature}", cancel=True)
        if record.kind == "trial" and not run.state.closing and record.model not in run.state.done_models:
            reason = why_search_ends(run, record.model)
            if reason:
                run.record(ModelDone(run.clock.now(), record.model, reason))
                run.say(f"{record.model}: no further trials: {reason}")

    def _tell(self, job: JobState) -> None:
        """The figures of an answered trial are those of the run that answers it."""
        run = self._run
        folder = run_folder_of(job.planned)
        if job.record is not None and job.record.status == "answered":
            folder = run_folder_of(run.state.jobs[run.state.first_of_configuration[job.planned.config_hash]].planned)
        run.trials[job.planned.model].tell(job, read_result(folder, run.model(job)))

    def _answer_twins(self) -> None:
        """Trials of a configuration that has a result by now take it; where it failed, one of them is run."""
        run = self._run
        for configuration, twins in list(run.state.twins.items()):
            for job in list(twins):
                first = run.state.first_of_configuration.get(configuration)
                if first is None:
                    run.record(TwinFailed(run.clock.now(), job.name))
                    continue
                source = run.state.jobs[first].record
                if source is not None and source.status in SUCCESSES:
                    record = answered_record(run.night, job, source)
                    run.record(JobConcluded(run.clock.now(), record))
                    self._after_conclusion(job, record)

    def _check_limits(self, now: float) -> None:
        run = self._run
        if run.state.closing:
            return
        deadline, most = run.limits.deadline_utc, run.limits.rank_seconds
        if deadline is not None and now >= deadline:
            self._close("deadline reached", cancel=True)
        elif most is not None and run.spent().rank_seconds >= most:
            self._close(f"budget spent: {most / 3600:.2f} rank-hours", cancel=True)

    def _close(self, cause: str, cancel: bool) -> None:
        run = self._run
        now = run.clock.now()
        asked = [CancelAsked(now, job.name, cause) for job in run.state.out.values() if not job.cancel_cause]
        run.record(ClosingBegun(now, cause), *(asked if cancel else ()))
        run.say(f"closing: {cause}" + (f"; {len(asked)} jobs are asked to end" if cancel and asked else ""))
        self._cancel_asked()

    def _cancel_asked(self) -> None:
        run = self._run
        if not run.state.closing:
            return
        now = run.clock.now()
        self._closing_since = self._closing_since or now
        for job in list(run.state.out.values()):
            attempt = job.live
            assert attempt is not None
            if not job.cancel_cause or attempt.id is None:
                continue
            if attempt.name not in self._cancelled:
                try:
                    run.launcher.cancel(attempt.name)
                except LauncherError as error:
                    self._filler.say_trouble(str(error))
                    return
                self._cancelled.add(attempt.name)
            elif now - self._closing_since > MOST_SECONDS_TO_END:
                status = run.latest.get(job.name) or JobStatus(attempt.name, attempt.id, "lost")
                run.record(Noted(now, f"{job.name}: still not ended {MOST_SECONDS_TO_END:.0f} s after it was asked to"))
                self._settle(job, dataclasses.replace(status, state="lost"), now)

    def _drop_what_waits(self) -> None:
        """When the night closes: what was never submitted, or would be tried again, is recorded as cancelled."""
        run = self._run
        if not run.state.closing:
            return
        waiting = [job for jobs in run.state.waiting.values() for job in jobs.values()]
        waiting += [job for twins in run.state.twins.values() for job in twins]
        for job in waiting:
            result = read_result(run_folder_of(job.planned), run.model(job))
            record = make_record(
                run.night,
                run.model(job),
                job,
                "cancelled",
                run.state.closing,
                result.values,
                run_folder_of(job.planned),
                None,
            )
            run.record(JobConcluded(run.clock.now(), record))
            self._tell(job)

    def _is_over(self) -> bool:
        state = self._run.state
        return bool(state.closing) and not state.out and not state.num_waiting and not state.num_twins

    def _why_nothing_is_left(self) -> str:
        state = self._run.state
        causes = [f"{model}: {cause}" for model, cause in state.done_models.items()]
        what = f"{state.num_waiting} planned jobs do not fit any more" if state.num_waiting else "all is done"
        return what + (f" ({'; '.join(causes)})" if causes else "")

    def _num_slots(self, now: float) -> int:
        """Asked anew now and then: nodes come and go, and asking may start a program."""
        asked, slots = self._slots
        if not slots or now - asked > SLOTS_VALID_SECONDS:
            try:
                slots = self._run.launcher.num_slots()
            except LauncherError as error:
                self._filler.say_trouble(str(error))
                return slots
            self._slots = (now, slots)
        return slots


def _with_account(lost: JobStatus, earlier: JobStatus) -> JobStatus:
    """What was known of a lost job before: the time for which it held its slots is not lost."""
    return dataclasses.replace(
        lost,
        reason=lost.reason or "unknown to the launcher",
        nodes=lost.nodes or earlier.nodes,
        started_utc=lost.started_utc or earlier.started_utc,
        allocated_seconds=max(lost.allocated_seconds, earlier.allocated_seconds),
        num_starts=max(lost.num_starts, earlier.num_starts),
    )
