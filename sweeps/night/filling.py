"""Free slots: which job takes the next one, what is asked of the search, and how jobs are given to the launcher."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace

from perception.errors import UserError
from sweeps.job import Job
from sweeps.launchers.launcher import LauncherError
from sweeps.night.budget import GUESSED_SECONDS, Account, Spent, fits, next_model, use_of, why_no_other
from sweeps.night.champions import best_known
from sweeps.night.events import (
    AttemptEnded,
    BestChosen,
    JobConcluded,
    ModelDone,
    SubmissionAnnounced,
    Submitted,
)
from sweeps.night.ingest import make_record
from sweeps.night.planned import add_jobs, add_trial, key_of, request_key
from sweeps.night.planned_jobs import attempt_name, launcher_job, run_folder_of
from sweeps.night.run import NightRun
from sweeps.night.state import JobState
from sweeps.night.trials import MOST_REPEATED_SUGGESTIONS

FULL_DISK_BYTES = 1 << 20
"""With less free, what is refused is refused for want of room, and no job is at fault."""
MOST_AT_ONCE = 2000
"""Jobs submitted in one turn."""


class Filler:
    def __init__(self, run: NightRun) -> None:
        self._run = run
        self._trouble = ""
        """Of the launcher, said once."""
        self._room_said = False
        self._num_slots = 1
        self._all_fixed = not any(trials.is_adaptive for trials in run.trials.values())

    def fill(self, num_slots: int) -> int:
        """Submit what free slots can take, then what is to wait for slots; returns how many jobs."""
        run = self._run
        num_submitted = 0
        # No slot stays free while the rest of a long night is drawn up.
        for ahead in (0, self._ahead(num_slots)):
            if run.state.closing or num_slots <= 0 or self._trouble:
                break
            self._num_slots = num_slots
            jobs = self._longest_first(self._chosen(num_slots, ahead))
            if jobs:
                self._announce(jobs)
                self.send(jobs)
            num_submitted += len(jobs)
        return num_submitted

    def send(self, jobs: Sequence[JobState]) -> None:
        """Give announced jobs to the launcher; those it does not confirm stay announced."""
        run = self._run
        given = [self._job(job) for job in jobs]
        try:
            ids = run.launcher.submit_many(given)
        except LauncherError as error:
            self.say_trouble(str(error))
            return
        except UserError:
            if shutil.disk_usage(run.folder).free < FULL_DISK_BYTES:
                raise
            # One of them can never run: found by giving them one by one, which starts nothing twice.
            self._send_singly(jobs, given)
            return
        now = run.clock.now()
        run.record(*(Submitted(now, job.name, _number(job), id) for job, id in zip(jobs, ids, strict=True)))

    def all_confirmed(self) -> bool:
        """No model whose search has ended still has its best trial to repeat."""
        state = self._run.state
        return all(name in state.confirmed_models for name in state.done_models)

    def confirm(self) -> None:
        """Look for jobs that were announced and never confirmed, before they are submitted again."""
        run = self._run
        waiting = [job for job in run.state.out.values() if job.live is not None and job.live.id is None]
        if not waiting:
            return
        try:
            known = run.launcher.adopt(f"{run.night.night}.")
        except LauncherError as error:
            self.say_trouble(str(error))
            return
        now = run.clock.now()
        found, missing = [], []
        for job in waiting:
            assert job.live is not None
            status = known.get(job.live.name)
            if status is not None and status.state != "lost":
                found.append(Submitted(now, job.name, job.live.number, status.id))
            else:
                missing.append(job)
        run.record(*found)
        if missing and not run.state.closing:
            self.send(missing)
        elif missing:
            run.record(*(_never_submitted(run, job) for job in missing))

    def trouble_is_over(self) -> None:
        self._trouble = ""

    def say_trouble(self, text: str) -> None:
        if text != self._trouble:
            self._trouble = text
            self._run.say(f"launcher: {text}; asked again until it answers")

    def confirm_best(self) -> None:
        """Repeat the best trial of a model whose search has ended: the best of many single runs is mostly lucky."""
        run = self._run
        for model in run.plan.models:
            name = model.model
            if run.state.closing or name not in run.state.done_models or name in run.state.confirmed_models:
                continue
            if model.population.size:
                # A schedule that was found on the way is no configuration that could be trained again.
                run.record(BestChosen(run.clock.now(), name, ""))
                continue
            jobs = run.state.waiting.get(name, {}).values()
            under_way = [job for job in run.state.out.values() if job.planned.model == name]
            if any(job.planned.kind == "trial" for job in [*under_way, *jobs]):
                continue
            records = [record for record in run.state.records if record.model == name]
            best = best_known([r for r in records if r.kind == "trial"], model, run.night.plan)
            champion = run.night.champions.get(name)
            if best is not None and not (champion and best.parameters == champion):
                known = {key_of(job.planned) for job in run.state.jobs.values() if job.planned.kind == "champion"}
                requests = run.planners[name].repeats("champion", best.parameters)
                requests = [request for request in requests if request_key(run, name, request) not in known]
                if run.limits.max_jobs is not None:
                    requests = requests[: max(0, run.limits.max_jobs - run.state.num_jobs)]
                run.say(f"{name}: best trial {best.job} at {best.value:.4g}; {len(requests)} repeats under other seeds")
                add_jobs(run, name, requests)
            run.record(BestChosen(run.clock.now(), name, best.job if best else ""))

    def _longest_first(self, jobs: Sequence[JobState]) -> list[JobState]:
        """As far as is known, so that those that begin last are short and the last slots fall free together."""
        expected = {job.name: self._expected(job) for job in jobs}
        # Of a night that has just begun only the samples are known.
        by_samples = None in expected.values()

        def seconds(job: JobState) -> float:
            work = job.planned.num_samples if by_samples else expected[job.name]
            return (work or 0.0) / job.planned.num_ranks

        # What was begun goes on before anything new.
        return sorted(jobs, key=lambda job: (-job.planned.priority, not job.attempts, -seconds(job)))

    def _chosen(self, num_slots: int, ahead: int) -> list[JobState]:
        """Jobs for the slots that are free and for `ahead` more ranks."""
        run = self._run
        free = num_slots - sum(job.planned.num_ranks for job in run.state.out.values())
        if free + ahead <= 0 or not self._has_room():
            return []
        spent = run.spent()
        accounts = self._accounts()
        waiting = {name: iter(list(jobs.values())) for name, jobs in run.state.waiting.items()}
        chosen: list[JobState] = []
        while accounts and free + ahead > 0 and len(chosen) < MOST_AT_ONCE:
            name = next_model(accounts.values())
            assert name is not None
            job = self._next_of(name, waiting.get(name, iter(())), spent, may_ask=free > 0 or self._all_fixed)
            if job is None:
                del accounts[name]
                continue
            expected = self._expected(job)
            free -= job.planned.num_ranks
            spent = replace(
                spent, num_jobs=run.state.num_jobs, rank_seconds_to_come=spent.rank_seconds_to_come + (expected or 0.0)
            )
            account = accounts[name]
            used = expected if expected is not None else GUESSED_SECONDS * job.planned.num_ranks
            accounts[name] = replace(account, rank_seconds=account.rank_seconds + used)
            chosen.append(job)
        return chosen

    def _next_of(self, model: str, waiting: Iterator[JobState], spent: Spent, may_ask: bool) -> JobState | None:
        run = self._run
        now = run.clock.now()
        for job in waiting:
            expected = self._expected(job)
            ranks = job.planned.num_ranks
            seconds = expected / ranks if expected is not None else None
            # What was begun is finished: its checkpoint would be lost otherwise.
            if job.attempts or not fits(run.limits, spent, now, seconds, ranks):
                return job
        return self._ask(model, spent, now) if may_ask else None

    def _ask(self, model: str, spent: Spent, now: float) -> JobState | None:
        run, state = self._run, self._run.state
        trials = run.trials[model]
        plan = trials.plan
        if model in state.done_models or not plan.space.parameters or not trials.can_ask():
            return None
        for _ in range(MOST_REPEATED_SUGGESTIONS):
            cause, for_good = self._why_no_trial(model, spent, now)
            if cause:
                if for_good:
                    run.record(ModelDone(now, model, cause))
                    run.say(f"{model}: no further trials: {cause}")
                return None
            suggestion = trials.search.ask()
            if suggestion is None:
                run.record(ModelDone(now, model, "nothing is left to try"))
                return None
            job = add_trial(run, model, suggestion.number, dict(suggestion.parameters))
            if job.phase == "waiting":
                trials.num_repeated = 0
                return job
            trials.num_repeated += 1
            run.say(f"{job.name}: trial {suggestion.number} is the same as {job.planned.same_as}: answered from it")
            if trials.num_repeated >= MOST_REPEATED_SUGGESTIONS:
                cause = f"its last {MOST_REPEATED_SUGGESTIONS} suggestions had all been tried"
                run.record(ModelDone(now, model, cause))
                run.say(f"{model}: no further trials: {cause}")
        return None

    def _why_no_trial(self, model: str, spent: Spent, now: float) -> tuple[str, bool]:
        """Why no trial may be asked for, and whether that stays so."""
        run = self._run
        plan = run.plan.model(model)
        if plan.max_trials and run.state.num_trials.get(model, 0) >= plan.max_trials:
            return f"{plan.max_trials} trials, as planned", True
        reserved_jobs, reserved_rank_seconds, reserved_seconds = self._reserved()
        limits = run.limits
        if limits.max_jobs is not None:
            limits = replace(limits, max_jobs=max(0, limits.max_jobs - reserved_jobs))
        if limits.rank_seconds is not None:
            limits = replace(limits, rank_seconds=max(0.0, limits.rank_seconds - reserved_rank_seconds))
        if limits.deadline_utc is not None:
            limits = replace(limits, deadline_utc=limits.deadline_utc - reserved_seconds)
        cause = why_no_other(limits, replace(spent, num_jobs=run.state.num_jobs))
        if cause:
            return cause, True
        expected = run.expected_rank_seconds(model, run.planners[model].num_samples(run.planners[model].trial(0, {})))
        seconds = expected / plan.num_ranks if expected is not None else None
        cause = fits(limits, spent, now, seconds, plan.num_ranks)
        if cause == "deadline reached" and run.limits.deadline_utc is not None and now < run.limits.deadline_utc:
            cause = "deadline: the time that is left is kept for repeats of the best"
        # What is expected of running jobs may not come: one that is pruned leaves budget for another.
        return cause, cause.startswith("deadline") or not run.state.out

    def _reserved(self) -> tuple[int, float, float]:
        """Jobs, rank-seconds and seconds kept for the repeats of each model's best trial."""
        run = self._run
        jobs, rank_seconds, longest = 0, 0.0, 0.0
        for model in run.plan.models:
            if model.space.parameters and not model.population.size and model.model not in run.state.confirmed_models:
                planner = run.planners[model.model]
                expected = run.expected_rank_seconds(model.model, planner.num_samples(planner.trial(0, {})))
                jobs += model.champion_repeats
                if not run.state.num_trials.get(model.model):
                    # Time is kept only where there is something to repeat: else a short night would try nothing.
                    continue
                rank_seconds += model.champion_repeats * (expected or 0.0)
                if model.champion_repeats and expected:
                    longest = max(longest, expected / model.num_ranks)
        return jobs, rank_seconds, max(longest, rank_seconds / max(1, self._num_slots))

    def _accounts(self) -> dict[str, Account]:
        run = self._run
        under_way = [
            (
                job.planned.model,
                max(run.used_rank_seconds(job), self._expected(job) or GUESSED_SECONDS * job.planned.num_ranks),
            )
            for job in run.state.out.values()
        ]
        used = use_of(run.state.rank_seconds, under_way)
        return {
            model.model: Account(model.model, model.share, model.priority, used.get(model.model, 0.0))
            for model in run.plan.models
        }

    def _ahead(self, num_slots: int) -> int:
        """Ranks beyond the slots for which jobs are queued, so that the launcher can fill gaps between wide jobs.

        What is asked of a search that learns is asked only when a slot is free.
        """
        run = self._run
        if run.launcher.name == "local":
            widest = max((model.num_ranks for model in run.plan.models), default=1)
            widest = max(widest, *(max(model.scaling.ranks, default=1) for model in run.plan.models))
            return min(num_slots, widest) - 1
        bounded = run.limits.max_jobs is not None or all(model.max_trials for model in run.plan.models)
        return 1_000_000 if self._all_fixed and bounded else num_slots

    def _has_room(self) -> bool:
        run = self._run
        needed = run.plan.retention.min_free_gib
        free = shutil.disk_usage(run.folder).free / 2**30
        if free >= needed:
            self._room_said = False
            return True
        text = (
            f"{run.folder}: {free:.2f} GiB are free, {needed:g} GiB are needed to start a job (retention.min_free_gib)"
        )
        if not run.state.out:
            raise UserError(f"{text}; make room, then go on with --resume")
        if not self._room_said:
            self._room_said = True
            run.say(f"{text}; waiting for room")
        return False

    def _expected(self, job: JobState) -> float | None:
        return self._run.expected_rank_seconds(job.planned.model, job.planned.num_samples)

    def _announce(self, jobs: Sequence[JobState]) -> None:
        run = self._run
        now = run.clock.now()
        excluded = tuple(sorted(run.state.excluded_nodes))
        run.record(
            *(
                SubmissionAnnounced(
                    now,
                    job.name,
                    len(job.attempts) + 1,
                    attempt_name(run.night.night, job.name, len(job.attempts) + 1),
                    excluded,
                )
                for job in jobs
            )
        )

    def _job(self, job: JobState) -> Job:
        run, attempt = self._run, job.live
        assert attempt is not None
        return launcher_job(job.planned, attempt.name, run.model(job), run.plan.image, attempt.excluded_nodes)

    def _send_singly(self, jobs: Sequence[JobState], given: Sequence[Job]) -> None:
        run = self._run
        for job, one in zip(jobs, given, strict=True):
            try:
                id = run.launcher.submit(one)
            except LauncherError as error:
                self.say_trouble(str(error))
                return
            except UserError as error:
                run.say(f"{job.name}: refused: {error}")
                run.record(_never_submitted(run, job, str(error)))
            else:
                run.record(Submitted(run.clock.now(), job.name, _number(job), id))


def _never_submitted(run: NightRun, job: JobState, refusal: str = "") -> JobConcluded:
    """The record of a job that the launcher refused, or that the end of the night overtook."""
    now = run.clock.now()
    status, cause = ("failed", refusal) if refusal else ("cancelled", run.state.closing)
    action, failure = ("give_up", "user_error") if refusal else ("cancel", "")
    ended = AttemptEnded(now, job.name, _number(job), action, failure, refusal)
    record = make_record(run.night, run.model(job), job, status, cause, {}, run_folder_of(job.planned), ended)
    return JobConcluded(now, record, ended)


def _number(job: JobState) -> int:
    assert job.live is not None
    return job.live.number
