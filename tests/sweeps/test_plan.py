"""Plans: what is read from a file, what is refused and how, and what `plan` prints before anything runs."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perception.config import flatten
from perception.errors import UserError
from sweeps import plan_command
from sweeps.planning.cost import Speed, estimate, measured_speeds
from sweeps.planning.plan import (
    FIGURES,
    METRICS,
    Budget,
    Constraint,
    ModelPlan,
    Plan,
    figure,
    job_assignments,
    load_plan,
    repeat_seed,
    run_config,
    study_name,
    training_argv,
)
from sweeps.planning.plan_text import parse_plan
from sweeps.planning.space import sample_of
from sweeps.record import JobRecord

PLANS = Path(__file__).parents[2] / "sweeps" / "plans"

PLAN = """
name = "night"
[budget]
max_jobs = 50
[[models]]
model = "lane-small"
objectives = ["culane_f1_50"]
num_samples = 4000
seeds = [3, 5]
[models.pruning]
name = "asha"
min_samples = 1000
[models.space."optim.lr"]
low = 1e-4
high = 1e-2
log = true
[models.space."train.batch_size_per_rank"]
choices = [2, 3, 8]
[models.overrides]
"data.num_validation_scenes" = 20
[models.scaling]
ranks = [1, 2, 16]
ranks_per_node = 8
[models.target]
metric = "culane_f1_50"
value = 0.5
"""
SLURM = PLAN.replace("[budget]", 'launcher = "slurm"\n[budget]', 1)


def parse(text: str) -> Plan:
    return parse_plan(text, "night.toml")


def parsed_model(text: str = SLURM) -> ModelPlan:
    return parse(text).models[0]


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_plan_that_comes_with_the_project_is_right(path: Path) -> None:
    plan = load_plan(path)
    assert plan.name == path.stem
    for model in plan.models:
        run_config(model, {parameter.name: parameter.at(0.5) for parameter in model.space.parameters})


def test_the_default_plan_shows_every_field() -> None:
    text = (PLANS / "nightly.toml").read_text()
    shown = set(re.findall(r"^(?:# )?\"?([a-z_]+)\"? = ", text, re.MULTILINE)) | set(re.findall(r"[a-z]+", text))
    shown |= set(re.findall(r"[a-z_]+", text))
    for cls in (Plan, Budget, ModelPlan, Constraint):
        missing = {f.name for f in fields(cls)} - shown - {"text", "path"}
        assert not missing, missing
    # With all comments taken as fields, it is still a right plan of the other launcher.
    uncommented = re.sub(r"^# ([a-z_]+ = .*|\[.*\])$", r"\1", text, flags=re.MULTILINE)
    table = tomllib.loads(uncommented)
    assert table["search"] == {"storage": "journal", "url_variable": "SWEEPS_STORAGE_URL"}
    defaults = parse(text)
    for section in ("local", "search", "retries", "retention", "notify"):
        for name, value in table[section].items():
            default = getattr(getattr(defaults, section), name)
            assert (list(default) if isinstance(default, tuple) else default) == value, (section, name)


def test_a_job_is_the_command_that_a_person_would_type() -> None:
    argv = training_argv(
        parsed_model(), {"optim.lr": 1e-3, "train.batch_size_per_rank": 3}, Path("/n/j"), 3, python=("python",)
    )
    assert " ".join(argv) == (
        "python -m pipelines train lane-small --out /n/j --resume-if-possible --data generated "
        "--set data.num_validation_scenes=20 --set optim.lr=0.001 "
        "--set train.batch_size_per_rank=3 --set train.evaluate_every_steps=334 --set train.num_samples=4000 "
        "--set train.seed=3"
    )


def test_a_run_ends_at_its_target_only_where_accuracy_is_not_searched_for() -> None:
    timed = parsed_model(SLURM.replace('["culane_f1_50"]', '["target_seconds"]').replace('"asha"', '"none"'))
    assert timed.ends_at_target and not parsed_model().ends_at_target
    argv = " ".join(training_argv(timed, {}, Path("/n/j")))
    assert "--target culane_f1_50=0.5" in argv and "evaluate_every_steps" not in argv
    assert "--target" not in training_argv(timed, {}, Path("/n/j"), num_samples=800), "a run that measures speed"
    # One that goes on is evaluated on the way, twenty times where no rung says when.
    noted = sample_of(job_assignments(parsed_model(SLURM.replace('"asha"', '"none"')), {}))
    assert noted["train.evaluate_every_steps"] == 4000 // 20 // 4
    assert study_name(timed) != study_name(
        parsed_model(
            SLURM.replace("0.5", "0.6").replace('["culane_f1_50"]', '["target_seconds"]').replace('"asha"', '"none"')
        )
    )


def test_every_multiple_of_the_first_rung_is_passed_by_an_evaluation_of_its_own() -> None:
    model = parsed_model()
    for batch in (2, 3, 8):
        values = sample_of(job_assignments(model, {"train.batch_size_per_rank": batch}))
        steps = values["train.evaluate_every_steps"]
        assert isinstance(steps, int)
        for multiple in (1, 2, 3):
            assert 1000 * multiple <= multiple * steps * batch < 1000 * (multiple + 1)


def test_runs_of_another_length_are_not_evaluated_on_the_way() -> None:
    values = sample_of(job_assignments(parsed_model(), {}, num_samples=800, num_ranks=2))
    assert values["train.num_samples"] == 800 and "train.evaluate_every_steps" not in values


def test_repeats_never_train_under_the_seed_of_the_trials() -> None:
    model = parsed_model()
    assert [repeat_seed(model, repeat) for repeat in range(4)] == [5, 6, 7, 8]
    assert repeat_seed(parsed_model(SLURM.replace("[3, 5]", "[9, 2]")), 1) == 10


def test_the_shape_of_scaling_runs_is_their_own() -> None:
    scaling = parsed_model().scaling
    assert [scaling.shape(ranks) for ranks in scaling.ranks] == [(1, 1), (1, 2), (2, 8)]


def test_the_study_is_another_where_values_cannot_be_compared() -> None:
    name = study_name(parsed_model())
    assert name.startswith("lane-small-" + parsed_model().space.hash())
    assert study_name(parsed_model(SLURM.replace("max_jobs = 50", "max_jobs = 9"))) == name
    for old, new in [
        ("high = 1e-2", "high = 2e-2"),
        ("num_samples = 4000", "num_samples = 5000"),
        ('["culane_f1_50"]', '["culane_mf1"]'),
        ('_scenes" = 20', '_scenes" = 21'),
        ("seeds = [3, 5]", "seeds = [4, 5]"),
    ]:
        assert study_name(parsed_model(SLURM.replace(old, new))) != name, new


def test_a_plans_own_failures_are_rules_and_mistakes_in_them_are_named() -> None:
    block = '[[failures]]\npattern = "lost .* storage"\nfailure = "data"\naction = "retry"\nmax_retries = 7\n'
    (rule,) = parse(SLURM + block).failures
    assert (rule.failure, rule.action, rule.max_retries, rule.patterns) == ("data", "retry", 7, ("lost .* storage",))
    assert parse(SLURM).failures == ()
    with pytest.raises(UserError, match=r'night\.toml: failures\[1\]: failure = "dta" is unknown; did you mean "data"'):
        parse(SLURM + block + block.replace('"data"', '"dta"'))
    with pytest.raises(UserError, match=r"night\.toml: failures must be tables"):
        parse("failures = 3\n" + SLURM)


def test_dotted_names_may_be_written_without_quotes() -> None:
    plain = SLURM.replace('models.space."optim.lr"', "models.space.optim.lr")
    plain = plain.replace('[models.overrides]\n"data.num', "[models.overrides.data]\nnum").replace(
        '_scenes"', "_scenes"
    )
    assert parsed_model(plain) == parsed_model()


MISTAKES = [
    ('launcher = "slurm"', 'launcer = "local"', 'field launcer is unknown; did you mean "launcher"'),
    ('launcher = "slurm"', 'launcher = "slrum"', 'launcher = "slrum" is unknown; did you mean "slurm"'),
    ('name = "night"', 'name = "my night"', 'name = "my night": must be of letters, digits and dashes'),
    ('name = "night"', "nam = 3", 'field nam is unknown; did you mean "name"'),
    ('name = "night"', 'name = "night"\ntext = "x"', "field text is unknown"),
    ("max_jobs = 50", "", "[budget] bounds nothing: give max_jobs"),
    ("[budget]\nmax_jobs = 50", "", "[budget] is missing"),
    ("max_jobs = 50", "max_jobs = -1", "budget.max_jobs = -1: must be finite and not negative"),
    ("max_jobs = 50", "max_jobs = 5.5", "budget.max_jobs must be a whole number, not 5.5"),
    ("max_jobs = 50", "max_jobs = true", "budget.max_jobs must be a whole number, not True"),
    ("max_jobs = 50", "rank_hours = nan", "budget.rank_hours = nan: must be finite"),
    ("max_jobs = 50", 'deadline = "7:00"', 'budget.deadline = "7:00": write hours and minutes'),
    ("max_jobs = 50", 'deadline = "24:00"', "budget.deadline"),
    ("max_jobs = 50", "max_job = 50", 'field budget.max_job is unknown; did you mean "max_jobs"'),
    ('"lane-small"', '"lane-smal"', 'model "lane-smal" is unknown; did you mean "lane-small"'),
    ('["culane_f1_50"]', '["culane_f50"]', 'metric "culane_f50" is unknown to task lane; did you mean "culane_f1_50"'),
    ('["culane_f1_50"]', '["ap50"]', 'metric "ap50" is unknown to task lane'),
    ('["culane_f1_50"]', '["culane_f1_50", "culane_f1_50"]', "a metric stands twice"),
    ('["culane_f1_50"]', "[]", "objectives is missing"),
    ('["culane_f1_50"]', '[{metric = "culane_f1_50", direction = "max"}]', 'direction = "max" is unknown'),
    ("seeds = [3, 5]", "seeds = []", "models.lane-small.seeds: give at least one"),
    ("seeds = [3, 5]", "seeds = [3, 3]", "models.lane-small.seeds"),
    ("seeds = [3, 5]", "share = 0", "models.lane-small.share: must be above 0"),
    ("seeds = [3, 5]", "num_sample = 3", 'field models.lane-small.num_sample is unknown; did you mean "num_samples"'),
    ("seeds = [3, 5]", 'sampler = "tep"', 'models.lane-small.sampler = "tep" is unknown; did you mean "tpe"'),
    ("seeds = [3, 5]", 'sampler = "cmaes"', "cmaes searches numbers only, train.batch_size_per_rank has choices"),
    ("seeds = [3, 5]", 'sampler = "grid"', "optim.lr: the grid sampler needs the values of this range"),
    ("seeds = [3, 5]", "default_repeats = 0\nchampion_repeats = 0", "nothing tells a better configuration from noise"),
    ("seeds = [3, 5]", 'data = 5', "models.lane-small.data must be a text, not 5"),
    ("min_samples = 1000", "min_samples = 4000", "pruning.min_samples: must be above 0 and below the 4,000 samples"),
    ("min_samples = 1000", "", "pruning.min_samples: must be above 0"),
    ("min_samples = 1000", "min_samples = 9\nreduction_factor = 1", "pruning.reduction_factor: must be at least 2"),
    ('name = "asha"', 'name = "aha"', 'models.lane-small.pruning.name = "aha" is unknown; did you mean "asha"'),
    ("optim.lr", "optim.lrr",
     'models.lane-small.space.optim.lrr: no such field of lane-small; did you mean "optim.lr"'),
    ("optim.lr", "lr", 'space.lr: no such field of lane-small; did you mean "optim.lr"'),
    ("optim.lr", "zzz", "`python -m pipelines show-config lane-small` lists all names"),
    ("optim.lr", "train.seed", "space.train.seed: write seeds = [...] at the model"),
    ("optim.lr", "optim", "space.optim: no such field"),
    ("low = 1e-4\nhigh = 1e-2\nlog = true", "low = -1.0\nhigh = 1.0", "space: optim.lr = -1.0: must be above 0"),
    ("log = true", "step = 0.003", "high = 0.01 is not low + a multiple of step = 0.003; the nearest one is 0.0091"),
    ("choices = [2, 3, 8]", "choices = [2, 0]", "space: train.batch_size_per_rank = 0: must be above 0"),
    ("choices = [2, 3, 8]", 'choices = [2, "x"]', "train.batch_size_per_rank: must be of type int, got 'x'"),
    ('"data.num_validation_scenes" = 20', '"data.num_validation_scene" = 20',
     'did you mean "data.num_validation_scenes"'),
    ('"data.num_validation_scenes" = 20', '"data.num_validation_scenes" = 0',
     "data.num_validation_scenes = 0: must be above"),
    ('"data.num_validation_scenes" = 20', '"optim.lr" = 0.1', "space.optim.lr: stands under overrides too"),
    ('"data.num_validation_scenes" = 20', '"train.num_samples" = 9', "write num_samples = ... at the model"),
    ("ranks = [1, 2, 16]", "ranks = [2, 4]", "scaling.ranks: must begin with 1"),
    ("ranks = [1, 2, 16]", "ranks = [1, 4, 2]", "scaling.ranks: must begin with 1, which the others"),
    ("ranks = [1, 2, 16]", "ranks = [1, 12]", "12 ranks do not fill nodes of 8"),
    ("value = 0.5", "", "field models.lane-small.target.value is missing"),
    ("value = 0.5", "value = 70", "target.value: 70 is never reached: metrics are from 0 to 1"),
    ('[models.target]\nmetric = "culane_f1_50"', '[models.target]\nmetric = "tusimple_fp"',
     "must be a metric of the evaluation that rises: culane_f1_50"),
    ('[models.target]\nmetric = "culane_f1_50"\nvalue = 0.5',
     '[[models.constraints]]\nmetric = "target_seconds"\nat_most = 9',
     "models.lane-small.target: is missing, which target_seconds is the time to"),
    ('name = "asha"\n', "", "models.lane-small.pruning.name is missing: without it the table does nothing"),
    ("ranks = [1, 2, 16]\n", "", "models.lane-small.scaling.ranks is missing"),
    ("value = 0.5", "value = 0.5\n[models.population]\nsamples_per_generation = 9", "population.size is missing"),
    ('[models.target]\nmetric = "culane_f1_50"', '[models.target]\nmetric = "seconds"',
     "must be a metric of the evaluation"),
    ("value = 0.5", "value = 0.5\n[[models]]\nmodel = 'lane-small'\nobjectives = ['culane_mf1']",
     "lane-small stands twice"),
    ("value = 0.5", "value = 0.5\n[models.population]\nsize = 8\nsamples_per_generation = 1000",
     "pruning.name: must be none"),
    ("value = 0.5", "value = 0.5\n[[models.constraints]]\nmetric = 'seconds'", "give either at_most or at_least"),
    ("[budget]", "[budget", "not TOML"),
    ("[budget]", "[search]\nurl_variable = 'A-B'\n[budget]", "search.url_variable names an environment variable"),
    ("[budget]", "[slurm]\ncontainer = 'pyxis'\n[budget]", "slurm.container = pyxis, but no image is given"),
    ("[budget]", "image = 'lane'\n[budget]", 'image = "lane": slurm.container is missing: write "pyxis" or "docker"'),
    ("[budget]", "[slurm]\npartion = 'x'\n[budget]", 'field slurm.partion is unknown; did you mean "partition"'),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), MISTAKES, ids=[f"{n}" for n in range(len(MISTAKES))])
def test_a_mistake_is_one_line_that_names_file_field_and_cure(old: str, new: str, message: str) -> None:
    assert old in SLURM
    with pytest.raises(UserError) as caught:
        parse(SLURM.replace(old, new, 1))
    text = str(caught.value)
    assert message in text
    assert text.startswith("night.toml: ") and "\n" not in text


LOCAL_MISTAKES = [
    ("seeds = [3, 5]", "num_nodes = 2", "num_nodes: 2 nodes need launcher = slurm"),
    ("seeds = [3, 5]", 'data = "/no/such/folder"', '"/no/such/folder" is no folder'),
    ("seeds = [3, 5]", "", "16 ranks on nodes of 8 are several nodes: launcher = slurm"),
]


@pytest.mark.parametrize(("old", "new", "message"), LOCAL_MISTAKES)
def test_what_one_host_cannot_do_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        parse(PLAN.replace(old, new, 1))


def test_a_plan_without_models_or_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"night\.toml: \[\[models\]\] is missing"):
        parse('name = "n"\n[budget]\nmax_jobs = 1')
    (tmp_path / "p.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"p\.toml: cannot be read \(not UTF-8\)"):
        load_plan(tmp_path / "p.toml")
    with pytest.raises(UserError, match=r"none\.toml: cannot be read \(No such file"):
        load_plan(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ('storage = "sqlite:///search.db"', "SQLite is locked when several write to it"),
        ('storage = "postgresql://u:secret@h/d"', "search.storage holds a password"),
        ('storage = "postgresql://h/d"', "write postgresql, and give the URL in the environment variable"),
        ('url_variable = "postgresql://:secret@h/d"', "search.url_variable holds a password"),
    ],
)
def test_no_secret_stands_in_a_plan_and_none_is_repeated(field: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(f"{PLAN}\n[search]\n{field}")
    assert message in str(caught.value) and "secret" not in str(caught.value)


def test_a_url_of_a_notification_is_refused_too() -> None:
    with pytest.raises(UserError, match=r"notify\.url_variables holds a password") as caught:
        parse(f'{PLAN}\n[notify]\nurl_variables = ["mailto://u:secret@h"]')
    assert "secret" not in str(caught.value)


def test_a_shared_grid_is_refused() -> None:
    text = SLURM.replace("log = true", "log = true\ngrid_points = 3").replace("seeds = [3, 5]", 'sampler = "grid"')
    assert parse(text).models[0].space.num_grid_points() == 9
    with pytest.raises(UserError, match=r"grid is for search\.storage = journal only"):
        parse(text + '\n[search]\nstorage = "postgresql"')


@settings(deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=60) | st.sampled_from(["[models]", "models = 3", "= 1"]))
def test_no_text_crashes_the_reader(text: str) -> None:
    for whole in (text, PLAN + text, text + PLAN):
        try:
            parse(whole)
        except UserError as error:
            assert str(error).startswith("night.toml: ")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "low", "high"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(deadline=None)
@given(st.sampled_from([f.name for f in fields(ModelPlan)]), JSON_VALUES)
def test_no_value_of_a_wrong_kind_crashes_the_reader(name: str, value: Any) -> None:
    line = json.dumps(value, ensure_ascii=False).replace("null", '"none"').replace(":", "=").replace('"a"=', "a=")
    text = f'name = "n"\n[budget]\nmax_jobs = 1\n[[models]]\nmodel = "sign"\nobjectives = ["ap"]\n{name} = {line}\n'
    if name in ("model", "objectives"):
        text = re.sub(rf"^{name} = .*\n", "", text, count=1, flags=re.MULTILINE)
    try:
        parse(text)
    except UserError as error:
        assert str(error).startswith("night.toml: ") and "\n" not in str(error)


def test_figures_are_read_where_result_json_has_them() -> None:
    result = {
        "metrics": {"ap50": 0.5, "ap": float("nan")},
        "throughput": {"images_per_second": 60},
        "target": {"reached_seconds": None},
        "seconds": 12.5,
    }
    names = ("ap50", "ap", "images_per_second", "target_seconds", "seconds", "num_parameters", "culane_f1_50")
    assert [figure(result, name) for name in names] == [0.5, None, 60.0, None, 12.5, None, None]
    assert figure({"metrics": None}, "ap50") is None
    assert not set(FIGURES) & {metric for metrics in METRICS.values() for metric in metrics}


def test_constraints_tell_how_far_they_are_broken() -> None:
    assert Constraint("seconds", at_most=10).excess(12) == 2
    assert Constraint("images_per_second", at_least=50).excess(60) == -10


# Cost.


def speeds() -> dict[tuple[str, int], Speed]:
    return {("lane-small", ranks): Speed(50.0 * ranks, 10.0, 5) for ranks in (1, 2, 16)}


def test_the_cost_of_known_speeds_adds_up() -> None:
    plan = parse(SLURM)
    cost = estimate(plan, speeds(), None, None)
    by_kind = {(group.kind, group.num_ranks): group for group in cost.groups}
    assert by_kind["default", 1].rank_hours == pytest.approx(3 * (4000 / 50 + 10) / 3600)
    assert by_kind["scaling", 16].rank_hours == pytest.approx(16 * (32_000 / 800 + 10) / 3600)
    trials = by_kind["trial", 1]
    # 50 jobs less three defaults, three champions, three of scaling; rungs at 1000 and 3000 of 4000.
    assert trials.num_jobs == 41
    assert trials.num_samples == round(1000 + 2000 / 3 + 1000 / 9)
    assert cost.num_jobs == 50 and cost.unknown == ()
    assert cost.rank_hours == pytest.approx(sum(group.rank_hours or 0 for group in cost.groups))


def test_without_measurements_the_cost_is_said_to_be_unknown() -> None:
    cost = estimate(parse(SLURM), {}, None, None)
    assert cost.rank_hours is None and cost.unknown == ("lane-small, ranks 1, 2, 16: not run in any night yet",)


def test_trials_without_a_bound_take_what_the_budget_leaves() -> None:
    plan = parse(SLURM.replace("max_jobs = 50", "rank_hours = 2.0"))
    cost = estimate(plan, speeds(), None, None)
    assert cost.rank_hours is not None and cost.budget_rank_hours == 2.0
    trials = next(group for group in cost.groups if group.kind == "trial")
    assert trials.num_jobs is not None and trials.hours_each is not None
    assert cost.rank_hours <= 2.0 < cost.rank_hours + 2 * trials.hours_each


def test_a_model_that_plans_few_trials_leaves_the_budgets_jobs_to_the_others() -> None:
    text = (PLANS / "demo.toml").read_text()
    text = text.replace("[budget]", "[budget]\nmax_jobs = 60").replace("max_trials = 16\n", "", 1)
    cost = estimate(parse(text), {}, None, None)
    trials = {group.model: group.num_jobs for group in cost.groups if group.kind == "trial"}
    # 60 less 3 + 2 + 2 of the one model and 4 + 3 of the other, whose 12 trials are less than its share.
    assert trials == {"lane-small": 60 - 14 - 12, "sign": 12} and cost.num_jobs == 60


def test_runs_on_more_ranks_than_slots_are_left_out_and_said() -> None:
    plan = parse(SLURM)
    cost = estimate(plan, speeds(), 8, 1.0)
    assert [group.num_ranks for group in cost.too_large] == [16]
    assert all(group.num_ranks <= 8 for group in cost.groups)
    assert "  left out: scaling on 16 ranks, there are 8 slots" in plan_command.summary(plan, cost, 8)


def test_speeds_are_medians_of_what_was_measured() -> None:
    def record(rate: float, seconds: float, held: float, **more: Any) -> JobRecord:
        values: dict[str, Any] = {"launcher": "local", "num_attempts": 1, "num_ranks": 2, **more}
        return JobRecord(
            "n",
            "j",
            "p",
            "lane-small",
            "trial",
            images_per_second=rate,
            seconds=seconds,
            rank_seconds_allocated=held,
            **values,
        )

    jobs = [
        record(100, 40, 100),
        record(110, 40, 104),
        record(300, 40, 200),
        record(999, 40, 80, launcher="slurm"),
        record(999, 40, 80, num_attempts=2),
    ]
    assert measured_speeds(jobs, "local") == {("lane-small", 2): Speed(110, 12.0, 3)}


def test_the_command_prints_what_would_run_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "night.toml"
    file.write_text(
        PLAN.replace("[1, 2, 16]", "[1, 2]").replace("[budget]", "[local]\nslots = 2\n[budget]\nmax_minutes = 30")
    )
    parser = argparse.ArgumentParser()
    plan_command.add_arguments(parser)
    assert plan_command.run(parser.parse_args([str(file), "--root", str(tmp_path / "nights")])) == 0
    shown = capsys.readouterr().out
    golden = Path(__file__).parents[1] / "golden" / "sweeps" / "plan.txt"
    assert shown == golden.read_text(), f"where the change is meant: write this output to {golden}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["night.toml"]


def test_what_this_host_has_not_is_said_after_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    plan_command.add_arguments(parser)
    local = PLAN.replace("[1, 2, 16]", "[1, 2]").replace("[budget]", "[local]\nslots = 2\n[budget]\nmax_minutes = 30")
    for text, said in [
        (local.replace("seeds = [3, 5]", "ranks_per_node = 4"), "its 4 ranks are more than the 2 slots there are here"),
        ('image = "trainn"\n' + local, 'image = "trainn": '),
    ]:
        # A mark at the begin, as some editors write it, is none of the text.
        (tmp_path / "night.toml").write_text("\ufeff" + text)
        with pytest.raises(UserError) as caught:
            plan_command.run(parser.parse_args([str(tmp_path / "night.toml"), "--root", str(tmp_path / "nights")]))
        assert said in str(caught.value) and "together: " in capsys.readouterr().out


def test_a_population_is_told_by_its_generations_and_has_no_champion_to_repeat() -> None:
    text = SLURM.replace('"asha"', '"none"').replace('[models.target]\nmetric = "culane_f1_50"\nvalue = 0.5\n', "")
    plan = parse(text + "[models.population]\nsize = 4\nsamples_per_generation = 1500\n")
    cost = estimate(plan, {}, None, None)
    assert {group.kind: group.num_jobs for group in cost.groups} == {"default": 3, "scaling": 1, "trial": 8}
    lines = plan_command.summary(plan, cost, None)
    assert "  population of 4, 2 generations of 1,500 samples; the worst 25% take over" in lines


def test_the_price_is_told_where_it_is_known() -> None:
    plan = parse("price_per_rank_hour = 2.5\n" + SLURM.replace("[1, 2, 16]", "[1]"))
    cost = estimate(plan, {("lane-small", 1): Speed(10.0, 0.0, 3)}, None, None)
    assert cost.rank_hours is not None
    last = plan_command.summary(plan, cost, None)[-1]
    assert f"{cost.rank_hours:.2f} rank-hours that cost {2.5 * cost.rank_hours:.2f}" in last


def test_a_deadline_already_past_today_is_tomorrow() -> None:
    plan = parse(SLURM.replace("max_jobs = 50", 'deadline = "07:00"'))
    noon = 1_800_000_000 // 86_400 * 86_400 + 12 * 3600
    assert plan_command.hours_to_end(plan, noon) == 19
    assert plan_command.hours_to_end(plan, noon - 6 * 3600) == 1
    assert plan_command.hours_to_end(plan, noon - 5 * 3600) == 24


def test_reading_a_plan_imports_no_optuna_and_no_torch() -> None:
    import subprocess

    script = "import sys, sweeps.plan_command, sweeps.planning.cost, sweeps.planning.plan_text; "
    script += "print([m for m in ('torch', 'optuna', 'duckdb', 'scipy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_searched_name_is_a_field_that_the_run_then_has() -> None:
    model = load_plan(PLANS / "nightly.toml").models[1]
    sample = {parameter.name: parameter.at(0.9) for parameter in model.space.parameters}
    trained = flatten(run_config(model, sample))
    assert {name: trained[name] for name in sample} == sample
