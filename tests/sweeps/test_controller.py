"""The controller over a fake launcher: whole nights in virtual time, and controllers killed wherever they can be."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from perception.errors import UserError
from sweeps.job import Job
from tests.sweeps.fake_launcher import Behaviour, FakeLauncher, FakeSearch
from tests.sweeps.night_cases import PRUNING, by_kind, case, make_plan, records_of


def test_a_night_runs_everything_that_was_planned(tmp_path: Path) -> None:
    night = case(tmp_path)
    assert night.drive()
    records = records_of(night)
    assert by_kind(records) == {"default": 2, "trial": 6, "champion": 2}
    assert {record.status for record in records} == {"finished"}
    assert len({(r.config_hash, r.seed) for r in records}) == 10
    state = night.state()
    assert state.closing.startswith("all is done") and not state.out and not state.num_waiting
    assert night.searches["lane-small"].told == dict.fromkeys(range(6), ("complete", (0.5,)))


def test_the_best_trial_is_repeated_under_other_seeds_at_the_end(tmp_path: Path) -> None:
    def behave(job: Job) -> Behaviour:
        return Behaviour(value=0.9 if job.name.endswith("0005.1") else 0.4)

    night = case(tmp_path, behave=behave)
    night.drive()
    records = {record.job: record for record in records_of(night)}
    best = records["lane-small-0005"]
    repeats = [record for record in records.values() if record.kind == "champion"]
    assert best.kind == "trial" and [r.parameters for r in repeats] == [best.parameters] * 2
    assert {r.config_hash for r in repeats} == {best.config_hash}
    assert len({best.seed, *(r.seed for r in repeats)}) == 3


def test_a_champion_of_past_nights_is_repeated_from_the_start(tmp_path: Path) -> None:
    champion = {"optim.lr": 0.002}
    night = case(tmp_path, champions={"lane-small": champion})
    night.drive()
    first = [record for record in records_of(night) if record.kind == "champion"][:2]
    assert [record.parameters for record in first] == [champion] * 2
    assert max(r.submitted_utc or 0 for r in first) == night.began_utc


def test_no_slot_waits_for_the_slowest_job(tmp_path: Path) -> None:
    """One job of a hundred times the length: all others run beside it, one after the other."""

    def behave(job: Job) -> Behaviour:
        return Behaviour(seconds=400 if job.name.endswith("0003.1") else 10)

    night = case(tmp_path, make_plan({"max_trials": 20, "champion_repeats": 0}), behave, slots=2)
    night.drive()
    records = records_of(night)
    slow = next(record for record in records if record.job.endswith("0003"))
    assert slow.ended_utc is not None
    assert sum(r.ended_utc < slow.ended_utc for r in records if r.ended_utc) == len(records) - 1
    begun = min(r.started_utc for r in records if r.started_utc)
    assert slow.ended_utc - begun < 400 + 30


def test_slots_are_never_given_to_more_ranks_than_there_are(tmp_path: Path) -> None:
    night = case(tmp_path, make_plan({"max_trials": 20, "ranks_per_node": 2}), slots=4)
    night.drive()
    assert isinstance(night.launcher, FakeLauncher) and night.launcher.most_running == 4


def test_models_get_their_shares_of_the_time(tmp_path: Path) -> None:
    sign = {"model": "sign", "metric": "ap50", "share": 1.0, "max_trials": 0}
    plan = make_plan({"share": 3.0, "max_trials": 0}, sign, budget="max_minutes = 10")

    def behave(job: Job) -> Behaviour:
        return Behaviour(seconds=60 if job.name.split(".")[1].startswith("sign") else 20)

    night = case(tmp_path, plan, behave, deadline_seconds=600)
    for search in night.searches.values():
        search.space = plan.models[0].space
    night.drive()
    used = Counter[str]()
    for record in records_of(night):
        used[record.model] += record.rank_seconds_allocated
    assert used["lane-small"] / used["sign"] == pytest.approx(3.0, rel=0.15)


def test_the_higher_priority_goes_first_whatever_its_share(tmp_path: Path) -> None:
    sign = {"model": "sign", "metric": "ap50", "priority": 5, "share": 0.01}
    night = case(tmp_path, make_plan({}, sign))
    night.drive()
    assert isinstance(night.launcher, FakeLauncher)
    first = night.launcher.submissions[:8]
    assert all(".sign-" in name for name in first)


def test_the_budget_of_jobs_is_kept_to_the_job(tmp_path: Path) -> None:
    """Trials leave room for the repeats of the best, and what is answered from a record does not count."""
    for number in (7, 8, 13):
        night = case(tmp_path / str(number), make_plan({"max_trials": 0}, budget=f"max_jobs = {number}"))
        night.drive()
        records = records_of(night)
        assert len(records) == number
        assert by_kind(records) == {"default": 2, "trial": number - 4, "champion": 2}


def test_the_budget_of_rank_hours_is_kept(tmp_path: Path) -> None:
    night = case(tmp_path, make_plan({"max_trials": 0}, budget="rank_hours = 0.1"))
    night.drive()
    records = records_of(night)
    used = sum(record.rank_seconds_allocated for record in records)
    # 360 s: seventeen jobs of 20 s, each held for up to a turn more.
    assert 300 <= used <= 364
    assert by_kind(records)["champion"] == 2
    assert {record.status for record in records} == {"finished"}


def test_at_the_deadline_jobs_are_cancelled_and_nothing_is_left(tmp_path: Path) -> None:
    night = case(tmp_path, make_plan({"max_trials": 0}), lambda job: Behaviour(seconds=170), deadline_seconds=100)
    night.drive()
    records = records_of(night)
    ended = Counter(record.status for record in records)
    assert ended == {"cancelled": 4} and night.state().closing == "deadline reached"
    assert isinstance(night.launcher, FakeLauncher)
    assert {run.status.state for run in night.launcher.runs.values()} == {"ended"}
    assert night.clock.time - night.began_utc < 110
    assert all(record.cause for record in records if record.status == "cancelled")


def test_a_job_that_never_ends_does_not_hold_up_the_night(tmp_path: Path) -> None:
    night = case(tmp_path, behave=lambda job: Behaviour(ending="deaf" if "-0002." in job.name else "finished"))
    night.deadline_seconds, night.clock.step_seconds = 300, 10.0
    night.drive()
    records = {record.job: record for record in records_of(night)}
    assert records["lane-small-0002"].status == "cancelled"
    assert any("lane-small-0002: still not ended" in note for note in night.state().notes)
    assert night.clock.time - night.began_utc < 300 + 1000


def test_a_short_night_tries_something_before_it_keeps_time_for_repeats(tmp_path: Path) -> None:
    """After the default's repeats there is time for a few jobs only: fewer than would be repeats of the best."""
    plan = make_plan({"max_trials": 0, "default_repeats": 4, "champion_repeats": 6})
    night = case(tmp_path, plan, lambda job: Behaviour(seconds=40), slots=2, deadline_seconds=180)
    night.drive()
    assert by_kind(records_of(night))["trial"] >= 1


def test_no_job_is_begun_that_cannot_end_before_the_deadline(tmp_path: Path) -> None:
    night = case(tmp_path, make_plan({"max_trials": 0}), lambda job: Behaviour(seconds=40), deadline_seconds=400)
    night.drive()
    records = records_of(night)
    assert {record.status for record in records} == {"finished"}
    # The time for the two repeats of the best was kept free.
    assert by_kind(records)["champion"] == 2
    assert "deadline" in night.state().done_models["lane-small"]


def test_a_trial_that_is_behind_at_its_rung_is_told_to_stop(tmp_path: Path) -> None:
    def behave(job: Job) -> Behaviour:
        number = int(job.name.rsplit("-", 1)[1].split(".")[0])
        value = 0.1 + 0.02 * ((number * 7) % 20)
        return Behaviour(seconds=40, value=value, curve=((100, value), (300, value), (600, value)))

    night = case(tmp_path, make_plan({"max_trials": 20, "more": PRUNING, "sampler": "random"}), behave)
    night.drive()
    trials = [record for record in records_of(night) if record.kind == "trial"]
    pruned = [record for record in trials if record.status == "pruned"]
    assert 5 < len(pruned) < 18
    for record in pruned:
        order = json.loads((Path(record.run_folder) / "control.json").read_text())
        assert order["stop"] == "pruned" and "asha" in order["cause"]
        assert record.rank_seconds_wasted == 0 and record.rank_seconds_allocated < 40
    told = night.searches["lane-small"].told
    assert {number for number, (outcome, _) in told.items() if outcome == "pruned"} == {r.trial for r in pruned}
    # The best was never ended, and every evaluation was told once.
    assert max(r.objective or 0 for r in trials if r.status == "finished") == pytest.approx(0.1 + 0.02 * 19)
    for reports in night.searches["lane-small"].reports.values():
        assert len(reports) == len({samples for samples, _ in reports})


def test_a_configuration_that_was_run_is_answered_from_its_record(tmp_path: Path) -> None:
    night = case(tmp_path, make_plan({"max_trials": 6, "champion_repeats": 0}), slots=1)
    night.searches["lane-small"].fixed = [{"optim.lr": 1e-3}, {"optim.lr": 2e-3}, {"optim.lr": 1e-3}]
    night.drive()
    answered = [record for record in records_of(night) if record.status == "answered"]
    assert [(r.trial, r.parameters, r.objective) for r in answered] == [(2, {"optim.lr": 1e-3}, 0.5)]
    assert "lane-small-0003" in answered[0].cause and answered[0].rank_seconds_allocated == 0
    assert night.searches["lane-small"].told[2] == ("complete", (0.5,))
    assert isinstance(night.launcher, FakeLauncher)
    assert not any(answered[0].job in name for name in night.launcher.submissions)


def test_a_configuration_that_is_running_is_waited_for(tmp_path: Path) -> None:
    night = case(tmp_path, make_plan({"max_trials": 4, "champion_repeats": 0, "default_repeats": 1}))
    night.searches["lane-small"].fixed = [{"optim.lr": 1e-3}] * 2
    night.drive()
    assert Counter(record.status for record in records_of(night)) == {"finished": 4, "answered": 1}


def test_the_models_own_values_are_the_models_own_configuration(tmp_path: Path) -> None:
    """A trial that suggests what the model has anyway is answered by a repeat of the default."""
    night = case(tmp_path, make_plan({"max_trials": 1, "champion_repeats": 0}))
    night.searches["lane-small"].fixed = [{"optim.lr": 1.5e-3}]
    night.drive()
    trial = next(record for record in records_of(night) if record.kind == "trial")
    assert trial.status == "answered"


def test_where_the_first_failed_an_equal_configuration_is_run(tmp_path: Path) -> None:
    def behave(job: Job) -> Behaviour:
        return Behaviour(ending="crash" if "-0002." in job.name else "finished")

    plan = make_plan({"max_trials": 3, "champion_repeats": 0, "default_repeats": 1})
    night = case(tmp_path, plan, behave)
    night.searches["lane-small"].fixed = [{"optim.lr": 1e-3}] * 3
    night.drive()
    assert [record.status for record in records_of(night)] == ["finished", "failed", "finished", "answered"]


def test_a_search_that_repeats_itself_ends(tmp_path: Path) -> None:
    night = case(tmp_path, make_plan({"max_trials": 0}))
    night.searches["lane-small"].fixed = [{"optim.lr": 1e-3}] * 500
    night.drive()
    assert "suggestions had all been tried" in night.state().done_models["lane-small"]
    assert Counter(r.status for r in records_of(night))["answered"] == 20


def test_a_search_ends_early_where_nothing_beyond_the_noise_is_to_be_expected(tmp_path: Path) -> None:
    def behave(job: Job) -> Behaviour:
        number = int(job.name.rsplit("-", 1)[1].split(".")[0])
        # Repeats of the default differ by .2, all trials by .01.
        return Behaviour(value=0.4 + 0.1 * number if number <= 3 else 0.5 + 0.001 * (number % 10))

    plan = make_plan({"max_trials": 60, "default_repeats": 3}, early_end="true")
    night = case(tmp_path, plan, behave)
    night.drive()
    assert 20 <= by_kind(records_of(night))["trial"] < 30
    assert "converged" in night.state().done_models["lane-small"]
    assert "with a probability of at most" in night.state().done_models["lane-small"]


def test_a_front_or_a_best_that_breaks_a_constraint_ends_no_search_early(tmp_path: Path) -> None:
    def behave(job: Job) -> Behaviour:
        number = int(job.name.rsplit("-", 1)[1].split(".")[0])
        return Behaviour(value=0.4 + 0.1 * number if number <= 3 else 0.5 + 0.001 * (number % 10))

    for name, more in {
        "front": {"metric": 'culane_f1_50", "seconds'},
        "constraint": {"more": '[[models.constraints]]\nmetric = "culane_f1_50"\nat_most = 0.5'},
    }.items():
        plan = make_plan({"max_trials": 30, "default_repeats": 3, **more}, early_end="true")
        night = case(tmp_path / name, plan, behave)
        night.drive()
        assert night.state().done_models["lane-small"] == "30 trials, as planned", name


def test_a_grid_is_run_as_a_whole_and_once(tmp_path: Path) -> None:
    night = case(tmp_path, make_plan({"max_trials": 0}))
    night.searches["lane-small"].most = 5
    night.drive()
    assert by_kind(records_of(night))["trial"] == 5
    assert night.state().done_models["lane-small"] == "nothing is left to try"


@pytest.mark.parametrize(
    ("ending", "status", "failure"),
    [
        ("crash", "failed", "code"),
        ("truncated", "failed", "no_result"),
        ("nan", "diverged", "not_finite"),
        ("diverged", "diverged", "not_finite"),
        ("vanish", "lost", None),
    ],
)
def test_success_is_what_the_runs_own_result_says(
    ending: str, status: str, failure: str | None, tmp_path: Path
) -> None:
    """An exit code of 0 is none; and one job that fails ends nothing but itself."""
    log = "Traceback (most recent call last):\nValueError: boom 12\n" if ending == "crash" else ""

    def behave(job: Job) -> Behaviour:
        return Behaviour(ending=ending, log=log) if "-0004." in job.name else Behaviour()

    night = case(tmp_path, behave=behave)
    assert night.drive()
    records = {record.job: record for record in records_of(night)}
    bad = records.pop("lane-small-0004")
    assert bad.status == status and bad.objective is None
    assert failure is None or bad.failure == failure
    assert bad.rank_seconds_wasted == bad.rank_seconds_allocated > 0
    assert {record.status for record in records.values()} == {"finished"}
    outcome, values = night.searches["lane-small"].told[bad.trial or 0]
    assert (outcome, values) == (("diverged" if status == "diverged" else "failed"), ())
    if ending == "crash":
        assert "boom" in bad.log_tail and "ValueError" in bad.failure_signature


def test_a_search_is_kept_from_where_memory_runs_out_and_not_from_where_code_fails(tmp_path: Path) -> None:
    for log, outcome in [("torch.OutOfMemoryError: CUDA out of memory.\n", "diverged"), ("KeyError: 'x'\n", "failed")]:
        night = case(tmp_path / outcome, make_plan({"max_trials": 3}))
        night.launcher.behave = lambda job, log=log: (  # type: ignore[attr-defined]
            Behaviour(ending="crash", log=log) if "optim.lr=" in " ".join(job.argv) else Behaviour()
        )
        night.drive()
        assert {told for told, _ in night.searches["lane-small"].told.values()} == {outcome}


def test_a_preempted_job_goes_on_from_its_checkpoint_and_has_not_failed(tmp_path: Path) -> None:
    def behave(job: Job) -> Behaviour:
        early = "-0004." in job.name and not job.name.endswith(".4")
        return Behaviour(seconds=12, ending="preempted" if early else "finished")

    plan = make_plan(more="[retries]\nmax_attempts = 1\n")
    night = case(tmp_path, plan, behave)
    night.drive()
    record = {record.job: record for record in records_of(night)}["lane-small-0004"]
    assert (record.status, record.num_attempts, record.failure) == ("finished", 4, None)
    # A step a second, a checkpoint every five: of each start the last two or three seconds are computed again.
    assert 3 * 2 <= record.rank_seconds_wasted <= 3 * 4
    assert record.rank_seconds_allocated >= 4 * 12


def test_a_job_that_is_preempted_for_ever_is_given_up(tmp_path: Path) -> None:
    def behave(job: Job) -> Behaviour:
        return Behaviour(seconds=3, ending="preempted" if "-0004." in job.name else "finished")

    night = case(tmp_path, behave=behave)
    night.drive()
    record = {record.job: record for record in records_of(night)}["lane-small-0004"]
    assert record.status == "failed" and "without a new checkpoint" in record.cause
    assert record.num_attempts == 11


def test_attempts_are_limited_and_a_bad_node_is_left_out(tmp_path: Path) -> None:
    def behave(job: Job) -> Behaviour:
        return Behaviour(ending="node_fail" if "-0004." in job.name else "finished")

    night = case(tmp_path, behave=behave)
    assert isinstance(night.launcher, FakeLauncher)
    night.launcher.nodes = tuple(f"node{n}" for n in range(8))
    night.drive()
    record = {record.job: record for record in records_of(night)}["lane-small-0004"]
    assert (record.status, record.num_attempts, record.failure) == ("failed", 3, "node")
    assert night.launcher.excluded == set(record.nodes) and len(record.nodes) == 3


def test_jobs_that_all_fail_alike_at_the_start_end_the_night(tmp_path: Path) -> None:
    log = "Traceback (most recent call last):\nRuntimeError: no such device 0x{:x}\n"

    def behave(job: Job) -> Behaviour:
        return Behaviour(seconds=5, ending="crash", log=log.format(hash(job.name) & 0xFFFF))

    night = case(tmp_path, make_plan({"max_trials": 100}), behave)
    night.drive()
    assert "failed alike before any succeeded" in night.state().closing
    assert "RuntimeError" in night.state().closing
    assert len([r for r in records_of(night) if r.status == "failed"]) < 12


def test_one_success_and_failures_no_longer_end_the_night(tmp_path: Path) -> None:
    def behave(job: Job) -> Behaviour:
        return Behaviour(seconds=5, ending="finished" if "-0001." in job.name else "crash", log="ValueError: x\n")

    night = case(tmp_path, make_plan({"max_trials": 12}), behave, slots=1)
    night.drive()
    assert by_kind(records_of(night))["trial"] == 12


def test_accounts_add_up(tmp_path: Path) -> None:
    def behave(job: Job) -> Behaviour:
        number = int(job.name.rsplit("-", 1)[1].split(".")[0])
        first = job.name.endswith(".1")
        endings = ["finished", "crash", "preempted", "node_fail", "finished"]
        return Behaviour(seconds=7 + number, ending=endings[number % 5] if first else "finished")

    night = case(tmp_path, make_plan({"max_trials": 20, "ranks_per_node": 2}), behave)
    assert isinstance(night.launcher, FakeLauncher)
    night.launcher.nodes = tuple(f"node{n}" for n in range(50))
    night.drive()
    allocated = sum(r.status.allocated_seconds * r.job.num_ranks for r in night.launcher.runs.values())
    records = records_of(night)
    assert sum(record.rank_seconds_allocated for record in records) == pytest.approx(allocated)
    assert all(0 <= record.rank_seconds_wasted <= record.rank_seconds_allocated for record in records)
    assert sum(night.state().rank_seconds.values()) == pytest.approx(allocated)


def test_a_launcher_that_is_away_is_waited_for(tmp_path: Path) -> None:
    from sweeps.launchers.launcher import LauncherError

    night = case(tmp_path)

    class Away(FakeLauncher):
        num_calls = 0

        def poll(self):  # type: ignore[no-untyped-def]
            Away.num_calls += 1
            if 3 < Away.num_calls < 60:
                raise LauncherError("slurmctld: connection refused")
            return super().poll()

        def submit_many(self, jobs):  # type: ignore[no-untyped-def]
            ids = super().submit_many(jobs)
            if Away.num_calls == 3:
                # It was heard, and the answer was lost.
                raise LauncherError("slurmctld: timed out")
            return ids

    night.launcher = Away(night.clock, 4, switch=night.switch)
    night.drive()
    assert {record.status for record in records_of(night)} == {"finished"}
    assert sum("connection refused" in line for line in night.said) == 1
    assert len(night.launcher.submissions) == len(set(night.launcher.submissions)) == 10


def test_a_job_that_the_launcher_refuses_fails_alone(tmp_path: Path) -> None:
    class Choosy(FakeLauncher):
        def submit_many(self, jobs):  # type: ignore[no-untyped-def]
            if any("-0002." in job.name for job in jobs):
                raise UserError("job lane-small-0002: no such partition")
            return super().submit_many(jobs)

    night = case(tmp_path)
    night.launcher = Choosy(night.clock, 4, switch=night.switch)
    night.drive()
    records = {record.job: record for record in records_of(night)}
    bad = records.pop("lane-small-0002")
    assert (bad.status, bad.failure, bad.cause) == ("failed", "user_error", "job lane-small-0002: no such partition")
    assert {record.status for record in records.values()} == {"finished"}


def test_scaling_runs_wider_than_the_machine_are_left_out_and_said(tmp_path: Path) -> None:
    more = "[models.scaling]\nranks = [1, 2, 4, 8]\nnum_samples_per_rank = 50\nrepeats = 2\n"
    night = case(tmp_path, make_plan({"more": more}))
    night.drive()
    scaling = [record for record in records_of(night) if record.kind == "scaling"]
    assert Counter(record.num_ranks for record in scaling) == {1: 2, 2: 2, 4: 2}
    assert len({record.config_hash for record in scaling}) == 1
    assert {record.num_nodes for record in scaling} == {1}
    assert any("8 ranks" in note for note in night.state().notes)


def test_a_signal_stops_the_controller_and_the_next_goes_on(tmp_path: Path) -> None:
    night = case(tmp_path)
    stopped = night.stop
    stopped.cause = "SIGTERM received"
    assert not night.drive()
    assert any("again with --resume --night 2026-11-30" in line for line in night.said)
    stopped.cause = ""
    assert night.drive()
    assert {record.status for record in records_of(night)} == {"finished"}
    assert night.state().num_controller_starts == 2


def test_full_disk_is_said_before_a_job_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    night = case(tmp_path, make_plan(more=""))
    import dataclasses

    night.plan = dataclasses.replace(night.plan, retention=dataclasses.replace(night.plan.retention, min_free_gib=1e9))
    with pytest.raises(UserError, match=r"GiB are free.*min_free_gib.*--resume"):
        night.drive()
    assert isinstance(night.launcher, FakeLauncher) and not night.launcher.submissions


def test_search_objects_are_as_real_ones() -> None:
    """The fake has the methods of the search that the controller uses."""
    from sweeps.search.search import Search

    for name in ("ask", "report", "tell", "running", "close"):
        assert callable(getattr(Search, name)) and callable(getattr(FakeSearch, name))


def test_a_population_trains_generation_after_generation(tmp_path: Path) -> None:
    """Each member goes on from a run folder of the generation before, its own or that of a better one."""
    from sweeps.night.trials import ModelTrials
    from sweeps.search.population_search import CHECKPOINT, PopulationSearch

    more = "[models.population]\nsize = 4\nsamples_per_generation = 300\n"
    plan = make_plan({"more": more, "max_trials": 0, "champion_repeats": 0, "default_repeats": 1})

    def behave(job: Job) -> Behaviour:
        lr = next((word for word in job.argv if word.startswith("optim.lr=")), "optim.lr=0")
        return Behaviour(seconds=5, value=0.5 + float(lr.partition("=")[2]))

    night = case(tmp_path, plan, behave, slots=3)
    run = night.take_up()
    population = PopulationSearch(plan.models[0], run.state)
    run.trials = {"lane-small": ModelTrials(plan.models[0], population, population.can_ask)}
    from sweeps.night.controller import Controller
    from sweeps.night.failures import classify

    assert Controller(run, classify, night.stop).drive()
    trials = {record.trial: record for record in records_of(night) if record.kind == "trial"}
    assert set(trials) == set(range(12)) and {r.status for r in trials.values()} == {"finished"}
    folders = {record.run_folder: number for number, record in trials.items()}
    for number, record in trials.items():
        parent = record.parameters.get(CHECKPOINT)
        assert (parent is None) == (number < 4)
        if parent is not None:
            assert folders[parent] // 4 == number // 4 - 1
    # Somebody took over from somebody else.
    assert any(folders[r.parameters[CHECKPOINT]] % 4 != n % 4 for n, r in trials.items() if n >= 4)
    assert night.state().done_models["lane-small"] == "nothing is left to try"


@pytest.mark.slow
def test_a_thousand_jobs_take_little_of_the_controllers_time(tmp_path: Path) -> None:
    """50 ms a job at most, with the fake launcher's own share, and no more with 1,000 than with 100."""
    import time

    def seconds_a_job(number: int) -> float:
        plan = make_plan({"max_trials": 0, "more": PRUNING}, budget=f"max_jobs = {number}")
        curve = ((100, 0.1), (300, 0.2))
        night = case(tmp_path / str(number), plan, lambda job: Behaviour(seconds=30, curve=curve), slots=64)
        night.clock.step_seconds = 5.0
        began = time.process_time()
        night.drive()
        assert len(records_of(night)) == number
        return (time.process_time() - began) / number

    few, many = seconds_a_job(100), seconds_a_job(1000)
    assert many < 0.05
    assert many < 2 * few + 0.01
