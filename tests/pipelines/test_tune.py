"""`tune` and `train --tuned`: the search on a simulated machine, what holds for whom, and one real short run."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from perception.config import override
from perception.errors import UserError
from pipelines import launch, tune
from pipelines.__main__ import main
from pipelines.configs import named_config
from pipelines.tune_search import Bench, Found, Settings, Stage, TimeIsOver, label, search
from pipelines.tuned_settings import Key, default_folder, find_tuned, key_of
from tests.pipelines.training_runs import ROOT, TINY, command, environment, run

ENGINE, LOCAL = "distributed.engine", "distributed.local_reduction"
FIRST, BUCKET = "distributed.first_bucket_mib", "distributed.bucket_mib"
CYCLE, WIRE = "distributed.horovod_cycle_time_milliseconds", "distributed.wire_format"


class Machine:
    """A clock that measurements move on, and processes that take time to start."""

    def __init__(self, step_seconds: Callable[[Settings], float], noise: float = 0.0, seed: int = 0) -> None:
        self.step_seconds, self.noise, self.random = step_seconds, noise, random.Random(seed)
        self.now = 0.0
        self.alive: set[str] = set()
        self.lines: list[str] = []
        self.cut_at = float("inf")

    def measure(self, settings: Settings) -> float:
        if label(settings) not in self.alive:
            self.now += 4.0
            self.alive.add(label(settings))
        self.now += 0.8
        if self.now > self.cut_at:
            raise TimeIsOver
        return self.step_seconds(settings) * self.random.lognormvariate(0, self.noise)

    def drop(self, settings: Settings) -> None:
        self.alive.discard(label(settings))

    def search(self, stages: Sequence[Stage], seconds: float = 120.0) -> Found:
        bench = Bench(self.measure, self.drop, lambda: 4.0, lambda: 0.8, lambda: self.now, self.lines.append)
        return search(stages, bench, seconds)


def two_stages() -> list[Stage]:
    def engines(best: Settings) -> list[Settings]:
        return [{**best, ENGINE: name} for name in ("a", "b", "c", "d")]

    def buckets(best: Settings) -> list[Settings]:
        return [{**best, BUCKET: mib} for mib in (1.0, 4.0)]

    return [Stage("engine", engines, 0.6), Stage("buckets", buckets, 1.0)]


def fastest_is_c_with_4(settings: Settings) -> float:
    return 0.1 * (0.8 if settings.get(ENGINE) == "c" else 1.05 if ENGINE in settings else 1) * (
        0.9 if settings.get(BUCKET) == 4.0 else 1.0
    )  # fmt: skip


# --- The search


@pytest.mark.parametrize("seed", range(5))
def test_the_fastest_is_found_in_noise(seed: int) -> None:
    machine = Machine(fastest_is_c_with_4, noise=0.02, seed=seed)
    found = machine.search(two_stages())
    assert found.settings == {ENGINE: "c", BUCKET: 4.0}
    assert found.gain is not None and found.gain.value == pytest.approx(1 / 0.72, rel=0.05)
    assert "times as fast as the defaults" in found.reason


def test_where_nothing_is_faster_the_defaults_stay() -> None:
    kept = [Machine(lambda _: 0.1, noise=0.05, seed=seed).search(two_stages()).settings == {} for seed in range(30)]
    assert sum(kept) >= 27


def test_a_gain_too_small_to_matter_is_not_taken() -> None:
    found = Machine(lambda settings: 0.1 - 0.0005 * (settings == {ENGINE: "b"})).search(two_stages())
    assert found.settings == {} and found.gain is not None and found.gain.low > 1
    assert "too little to matter" in found.reason


@pytest.mark.parametrize("seconds", [10, 20, 40, 60, 120, 300])
def test_the_time_is_kept_and_what_was_left_out_is_told(seconds: float) -> None:
    machine = Machine(fastest_is_c_with_4)
    found = machine.search(two_stages(), seconds)
    assert machine.now <= 1.2 * seconds
    left_out = [trial for trial in found.trials if "no time" in trial.failure]
    assert bool(left_out) == any("no time for" in line for line in machine.lines)
    # Each other way was measured, or it is told why not.
    assert all(bool(trial.seconds) != bool(trial.failure) for trial in found.trials if trial.settings)


def test_more_time_is_spent_on_the_better() -> None:
    found = Machine(fastest_is_c_with_4).search(two_stages())
    engines = {trial.settings.get(ENGINE): len(trial.seconds) for trial in found.trials if trial.stage == "engine"}
    assert engines["c"] > min(engines.values()) > 0


def test_the_defaults_are_never_dropped_and_losers_are() -> None:
    machine = Machine(fastest_is_c_with_4)
    found = machine.search(two_stages())
    assert machine.alive == {"defaults", label(found.settings)}


def test_what_fails_is_told_and_not_taken() -> None:
    def fails(settings: Settings) -> float:
        if settings.get(ENGINE) == "c":
            raise UserError("no such device")
        return fastest_is_c_with_4(settings)

    machine = Machine(fails)
    found = machine.search(two_stages())
    assert found.settings == {BUCKET: 4.0}
    assert "  engine=c: failed: no such device" in machine.lines
    assert [trial.failure for trial in found.trials if trial.settings == {ENGINE: "c"}] == ["failed: no such device"]


def test_what_dies_in_a_later_turn_is_given_up() -> None:
    turns = 0

    def dies(settings: Settings) -> float:
        nonlocal turns
        turns += settings.get(ENGINE) == "c"
        if turns > 1 and settings.get(ENGINE) == "c":
            raise UserError("a process ended")
        return fastest_is_c_with_4(settings)

    assert Machine(dies).search(two_stages()).settings == {BUCKET: 4.0}


def test_defaults_that_fail_are_an_error() -> None:
    def fails(settings: Settings) -> float:
        raise UserError("no memory")

    with pytest.raises(UserError, match="no memory"):
        Machine(fails).search(two_stages())


def test_an_end_amid_the_last_comparison_leaves_the_defaults() -> None:
    machine = Machine(fastest_is_c_with_4)
    whole = machine.search(two_stages())
    ended = machine.now - 1.6 * len(whole.duel[0])
    machine = Machine(fastest_is_c_with_4)
    machine.cut_at = ended + 5 * 1.6 + 0.1
    found = machine.search(two_stages())
    assert found.settings == {} and len(found.duel[0]) == 5
    assert "5 rounds of the 7" in found.reason and "--seconds" in found.reason


# --- What is tried


def ways_of(stage: int, best: Settings, *assignments: str) -> list[Settings]:
    config = override(named_config("lane-small"), ["distributed.engine=torch", *assignments])
    held = {text.partition("=")[0] for text in assignments}
    return list(tune.stages(config, 2, held)[stage].ways(best))


@pytest.fixture
def both_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_installed", lambda: [("horovod", "gloo"), ("torch", "gloo")])
    monkeypatch.setattr(
        tune,
        "_placement",
        lambda config, ranks: ("torch" if config.distributed.engine == "auto" else config.distributed.engine, "gloo"),
    )


def test_every_installed_engine_is_tried_both_ways(both_engines: None) -> None:
    ways = ways_of(0, {})
    assert {LOCAL: "engine"} in ways
    assert {ENGINE: "horovod", "distributed.transport": "gloo"} in ways
    assert {ENGINE: "horovod", "distributed.transport": "gloo", LOCAL: "engine"} in ways
    assert len([way for way in ways if way]) == 3


def test_what_the_user_sets_is_not_searched(both_engines: None) -> None:
    assert [way for way in ways_of(0, {}, "distributed.transport=gloo") if way] == [{LOCAL: "engine"}]
    assert [way for way in ways_of(0, {}, f"{LOCAL}=engine", f"{ENGINE}=torch") if way] == []
    assert ways_of(1, {}, f"{BUCKET}=7") == []


def test_buckets_are_tried_around_the_best(both_engines: None) -> None:
    ways = ways_of(1, {LOCAL: "engine"})
    assert {LOCAL: "engine", FIRST: 0.25, BUCKET: 1.0} in ways
    assert {LOCAL: "engine", BUCKET: 25.0} in ways, "1 MiB is the first bucket's default"


def test_narrow_floats_and_cycles_only_where_they_matter(both_engines: None) -> None:
    in_memory, by_engine = ways_of(2, {}), ways_of(2, {LOCAL: "engine", ENGINE: "horovod"})
    assert not any(WIRE in way or CYCLE in way for way in in_memory)
    assert sum(way.get(WIRE) == "fp16" for way in by_engine) == 1
    assert sum(CYCLE in way for way in by_engine) == len(tune.CYCLES_MILLISECONDS)
    assert not any(WIRE in way for way in ways_of(2, {LOCAL: "engine"}, f"{WIRE}=fp32"))


def test_fewer_threads_are_tried_where_there_are_more(both_engines: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "available_cores", lambda: 16)
    assert [way["train.num_threads_per_rank"] for way in ways_of(2, {})] == [1, 4, 7]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "--ranks 1: must be at least 2"),
        (["--seconds", "0"], "--seconds 0: must be above 0"),
        (["--out", "no/such/file.json"], "folder no/such does not exist"),
        (["--set", "distributed.bucket_mb=3"], "no such field"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(["tune", "lane-small", *arguments])


def test_not_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_placement", lambda *_: ("torch", "nccl"))
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES"):
        main(["tune", "lane-small"])


# --- Whom settings hold for


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Key:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "HOROVOD_RANK", "HOROVOD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return key_of(named_config("lane-small"), ranks=2, num_hosts=1)


def write(key: Key, settings: dict[str, Any], path: Path | None = None) -> Path:
    path = path or default_folder() / key.file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"key": dataclasses.asdict(key), "settings": settings, "reason": "fast", "date": "2026-01-02T03:04:05Z"}
    path.write_text(json.dumps(content))
    return path


def test_the_key_counts_parameters_and_knows_the_size(key: Key) -> None:
    assert key.num_parameters > 1_000_000 and key.input_size == (160, 512)
    wider = override(named_config("lane-small"), ["model.neck_channels=96"])
    assert key_of(wider, 2, 1).num_parameters > key.num_parameters


def test_settings_are_found_for_their_own_key_only(key: Key) -> None:
    assert find_tuned(key, None)[0] is None and "has none of lane-small" in find_tuned(key, None)[1]
    path = write(key, {BUCKET: 4.0})
    found, _ = find_tuned(key, None)
    assert found is not None and (found.path, found.settings) == (path, {BUCKET: 4.0})
    for other in (
        dataclasses.replace(key, ranks=4),
        dataclasses.replace(key, processor="another"),
        dataclasses.replace(key, torch="9.9"),
        dataclasses.replace(key, num_hosts=2),
    ):
        assert find_tuned(other, None)[0] is None


def test_a_stale_key_is_told_in_one_line(key: Key) -> None:
    write(dataclasses.replace(key, ranks=8, torch="1.0"), {})
    write(dataclasses.replace(key, torch="1.0"), {})
    _, line = find_tuned(key, None)
    assert f"torch 1.0 there, {key.torch} here" in line and "ranks" not in line.partition("(")[2].partition(")")[0]
    assert line.endswith("python -m pipelines tune lane-small --ranks 2") and "\n" not in line


def test_a_file_of_another_machine_under_this_key_s_name_is_not_taken(key: Key) -> None:
    write(dataclasses.replace(key, processor="another"), {BUCKET: 4.0}, default_folder() / key.file_name)
    found, line = find_tuned(key, None)
    assert found is None and "processor another there" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": {"optim.lr": 1.0}}, "settings.optim.lr"),
        ({"settings": {BUCKET: True}}, "settings.distributed.bucket_mib = True"),
        ({"settings": []}, "field settings"),
        ({"date": None}, "field date"),
    ],
)
def test_a_bad_file_is_named(key: Key, change: dict[str, Any], message: str) -> None:
    path = write(key, {})
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=message) as caught:
        find_tuned(key, None)
    assert str(path) in str(caught.value) and "pipelines tune" in str(caught.value)


def test_a_file_cut_short_is_named(key: Key) -> None:
    path = write(key, {})
    path.write_text(path.read_text()[:30])
    with pytest.raises(UserError, match="cannot be read as tuned settings"):
        find_tuned(key, None)


# --- train --tuned


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[list[str], str, str]]:
    record: list[tuple[list[str], str, str]] = []

    def launch_ranks(argv: Sequence[str], ranks: int, engine: str, transport: str, *_: Any) -> int:
        record.append(([word for word in argv if "=" in word], engine, transport))
        return 0

    monkeypatch.setattr(launch, "launch_ranks", launch_ranks)
    monkeypatch.chdir(tmp_path)
    return record


Launches = list[tuple[list[str], str, str]]
TUNED = {ENGINE: "torch", "distributed.transport": "gloo", BUCKET: 4.0}


def test_tuned_settings_lie_under_the_user_s(key: Key, launched: Launches, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(key, TUNED)
    assert main(["train", "lane-small", "--ranks", "2", "--tuned", "--set", "optim.lr=1e-3"]) == 0
    assert main(["train", "lane-small", "--ranks", "2", "--tuned", "--set", f"{BUCKET}=9"]) == 0
    (first, engine, transport), (second, _, _) = launched
    assert first == [f"{ENGINE}=torch", "distributed.transport=gloo", f"{BUCKET}=4.0", "optim.lr=1e-3"]
    assert (engine, transport) == ("torch", "gloo")
    assert second == [f"{ENGINE}=torch", "distributed.transport=gloo", f"{BUCKET}=9"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"tuned settings: {ENGINE}=torch") and str(path) in lines[0]
    assert f"not {BUCKET}, chosen otherwise" in lines[1]


@pytest.mark.parametrize("choice", [["--engine", "torch"], ["--set", f"{ENGINE}=torch"]])
def test_an_engine_of_the_user_s_is_not_paired_with_a_tuned_transport(
    choice: list[str], key: Key, launched: Launches
) -> None:
    write(key, {ENGINE: "horovod", "distributed.transport": "mpi", BUCKET: 4.0})
    assert main(["train", "lane-small", "--ranks", "2", "--tuned", *choice]) == 0
    assert launched[0][1:] == ("torch", "gloo")
    assert f"{BUCKET}=4.0" in launched[0][0]


def test_nothing_is_taken_from_another_case(
    key: Key, launched: Launches, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = write(dataclasses.replace(key, num_cores=99), TUNED, tmp_path / "mine.json")
    common = ["train", "lane-small", "--ranks", "2", "--set", f"{ENGINE}=torch"]
    assert main([*common, "--tuned-from", str(other)]) == 0
    assert main([*common, "--tuned"]) == 0
    assert [words for words, _, _ in launched] == [[f"{ENGINE}=torch"]] * 2
    first, second = capsys.readouterr().out.splitlines()
    assert "num_cores 99 there" in first and "has none of lane-small" in second


def test_a_missing_file_and_a_bad_value_are_errors(key: Key, launched: Launches, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--tuned-from .*no such file"):
        main(["train", "lane-small", "--ranks", "2", "--tuned-from", str(tmp_path / "none.json")])
    path = write(key, {LOCAL: "by post"})
    with pytest.raises(UserError, match="local_reduction") as caught:
        main(["train", "lane-small", "--ranks", "2", "--tuned"])
    assert str(path) in str(caught.value)
    assert launched == []


def test_horovod_s_fusion_threshold_is_a_setting_and_the_environment_wins() -> None:
    from perception.config import DistributedConfig
    from perception.distributed.environment import RankEnvironment
    from perception.distributed.start import _prepare_horovod

    place = RankEnvironment(launcher="horovod", size=2, local_size=2)
    for config, before, expected in (
        (DistributedConfig(), {}, "0"),
        (DistributedConfig(horovod_fusion_threshold_mib=1.5), {}, str(3 << 19)),
        (DistributedConfig(horovod_fusion_threshold_mib=1.5), {"HOROVOD_FUSION_THRESHOLD": "7"}, "7"),
    ):
        environ: dict[str, str] = dict(before)
        _prepare_horovod(config, "gloo", place, environ)
        assert environ["HOROVOD_FUSION_THRESHOLD"] == expected


# --- A real search


def _settings(**more: Any) -> dict[str, Any]:
    kept = {name: value for name, value in TINY.items() if not name.startswith("data.")}
    return {**kept, ENGINE: "torch", **more}


@pytest.mark.slow
def test_a_real_search(tmp_path: Path) -> None:
    words = ["tune", "lane-small", "--ranks", "2", "--seconds", "40", "--out", str(tmp_path / "tuned.json")]
    done = run(command(*words, settings=_settings()), tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "tuned.json").read_text())
    assert content["seconds"] <= 1.2 * 40
    assert content["key"]["ranks"] == 2 and content["key"]["input_size"] == [64, 160]
    assert content["tried"][0]["settings"] == {} and content["versions"]["torch"]
    assert all(seconds > 0 for trial in content["tried"] for seconds in trial["seconds"])
    assert set(content["settings"]) <= {name for trial in content["tried"] for name in trial["settings"]}
    assert content["reason"] in done.stdout and str(tmp_path / "tuned.json") in done.stdout
    assert not (tmp_path / "cache" / "roadfuse" / "tuned").exists()


@pytest.mark.slow
def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    words = ["tune", "lane-small", "--ranks", "2", "--out", str(tmp_path / "tuned.json")]
    variables = {**environment(tmp_path / "cache"), "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    argv = command(*words, settings=_settings())
    with subprocess.Popen(argv, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            while not process.stdout.readline().startswith("  ms a step"):
                assert process.poll() is None
            family = psutil.Process(process.pid).children(recursive=True)
            assert len(family) >= 3
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    assert list(tmp_path.glob("tune*")) == []
