"""The long record: what was written is read again, from any version; what is damaged is named and left out."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perception.errors import UserError
from sweeps.ledger.history import History
from sweeps.record import JobRecord, NightRecord
from tests.ranks import ROOT

DAY = 86_400.0


def night_record(name: str = "2026-11-30", started_utc: float = 20_000 * DAY, **fields: Any) -> NightRecord:
    values = {
        "night": name,
        "plan": "nightly",
        "plan_text": 'name = "nightly" # it\'s a plan\n',
        "launcher": "slurm",
        "num_slots": 512,
        "hardware": "8 x NVIDIA H100",
        "image": "sha256:12",
        "git_revision": "ab" * 20,
        "started_utc": started_utc,
        "champions": {"lane-small": {"optim.lr": 1e-3, "model.backbone_widths": [8, 16]}},
        "notes": ("a node was excluded",),
        **fields,
    }
    return NightRecord(**values)


def job_record(night: str = "2026-11-30", number: int = 0, **fields: Any) -> JobRecord:
    values = {"job": f"lane-small-{number:04d}", "plan": "nightly", "model": "lane-small", "kind": "trial", **fields}
    return JobRecord(night, **values)


def partition(history: History, name: str) -> Path:
    return history.folder / f"night={name}"


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
FLOATS = st.floats(allow_nan=False)
JOBS = st.builds(
    job_record,
    number=st.integers(0, 10_000),
    trial=st.none() | st.integers(0, 2**40),
    parameters=st.dictionaries(TEXTS, st.none() | st.booleans() | FLOATS | TEXTS | st.lists(st.integers())),
    metrics=st.dictionaries(TEXTS, st.floats(allow_nan=False, allow_infinity=False)),
    failure=st.none() | st.sampled_from(["out_of_memory", "code"]),
    log_tail=TEXTS,
    objective=st.none() | FLOATS,
    nodes=st.lists(TEXTS, max_size=3).map(tuple),
    command=TEXTS,
)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=st.lists(JOBS, max_size=5), notes=st.lists(TEXTS, max_size=3).map(tuple), deadline=st.none() | FLOATS)
def test_what_was_written_is_read_again(
    tmp_path: Path, jobs: list[JobRecord], notes: tuple[str, ...], deadline: float | None
) -> None:
    """Whatever it holds; a night written again takes the place of the earlier one."""
    night = night_record(notes=notes, deadline_utc=deadline)
    History(tmp_path).append_night(night, jobs)
    history = History(tmp_path)
    assert history.nights() == [night] and history.jobs() == jobs and history.left_out == ()


def test_a_value_that_is_no_number_stays_one(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.append_night(night_record(), [job_record(objective=float("nan"), metrics={"ap": float("inf")})])
    (job,) = history.jobs()
    assert job.objective != job.objective and job.metrics == {"ap": float("inf")}


def test_nights_and_jobs_are_chosen_and_in_order_of_time(tmp_path: Path) -> None:
    history = History(tmp_path)
    names = ["2026-11-30", "2026-11-30.2", "2026-11-30.10", "2026-12-01"]
    for place, name in reversed(list(enumerate(names))):
        jobs = [job_record(name, number, model=model) for number, model in enumerate(["sign", "lane-small", "sign"])]
        history.append_night(night_record(name, place * DAY), jobs)
    assert [night.night for night in history.nights()] == names
    assert [night.night for night in history.nights(2)] == names[2:]
    assert history.nights(0) == [] and len(history.nights(100)) == 4
    assert [(job.night, job.job) for job in history.jobs("lane-small")] == [(name, "lane-small-0001") for name in names]
    assert [job.night for job in history.jobs("sign", 1)] == names[3:] * 2
    assert [job.night for job in history.jobs(nights={names[1], "never"})] == names[1:2] * 3
    assert history.jobs("lane") == [] and history.jobs(nights=0) == []


def test_a_root_without_records_is_empty(tmp_path: Path) -> None:
    history = History(tmp_path / "none")
    assert history.nights() == [] and history.jobs() == [] and history.left_out == ()
    assert not (tmp_path / "none").exists()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0x10
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [truncate, flip, lambda path: path.write_bytes(b""), Path.unlink])
@pytest.mark.parametrize("name", ["jobs.parquet", "night.parquet"])
def test_a_damaged_partition_is_named_and_left_out(tmp_path: Path, name: str, damage: Any) -> None:
    for number in (1, 2, 3):
        History(tmp_path).append_night(
            night_record(f"2026-11-0{number}", number * DAY), [job_record(f"2026-11-0{number}")]
        )
    history = History(tmp_path)
    damaged = partition(history, "2026-11-02")
    damage(damaged / name)
    assert [job.night for job in history.jobs()] == ["2026-11-01", "2026-11-03"]
    assert [night.night for night in history.nights()] == ["2026-11-01", "2026-11-03"]
    (line,) = history.left_out
    assert line.startswith(f"{damaged}: left out (") and name in line and "run that night's `nightly` again" in line
    history.append_night(night_record("2026-11-02", 2 * DAY), [job_record("2026-11-02")])
    assert len(history.nights()) == 3 and len(history.jobs()) == 3 and history.left_out == ()


def test_damage_is_seen_though_the_night_was_read_before(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.append_night(night_record(), [job_record()])
    assert len(history.jobs()) == 1
    truncate(partition(history, "2026-11-30") / "jobs.parquet")
    assert history.jobs() == [] and "jobs.parquet is not the one that" in history.left_out[0]


def rewrite(folder: Path, jobs_sql: str, marks: str = "roadfuse_schema: '1'") -> None:
    """The partition as another version would have written it: columns chosen by SQL."""
    jobs, night = folder / "jobs.parquet", folder / "night.parquet"
    with duckdb.connect() as connection:
        source = f"read_parquet('{jobs}', hive_partitioning = false)"
        connection.execute(f"CREATE TABLE jobs AS {jobs_sql.format(jobs=source)}")
        connection.execute(f"CREATE TABLE night AS SELECT * FROM read_parquet('{night}', hive_partitioning = false)")
        notes = connection.execute("SELECT key, value FROM parquet_kv_metadata(?)", [str(night)]).fetchall()
        connection.execute(f"COPY jobs TO '{jobs}' (FORMAT parquet, KV_METADATA {{{marks}}})")
        digest = hashlib.sha256(jobs.read_bytes()).hexdigest()
        noted = {**{key.decode(): value.decode() for key, value in notes}, "jobs_sha256": digest}
        text = ", ".join(f"{key}: '{value}'" for key, value in noted.items())
        connection.execute(f"COPY night TO '{night}' (FORMAT parquet, KV_METADATA {{{text}}})")


def test_files_of_an_older_version_lack_columns_and_take_defaults(tmp_path: Path) -> None:
    history = History(tmp_path)
    jobs = [job_record(number=number, seed=7, nodes=("dgx1",), objective=0.5) for number in range(2)]
    history.append_night(night_record(), jobs)
    left_out = "seed, nodes, parameters, objective, log_tail"
    rewrite(partition(history, "2026-11-30"), f"SELECT * EXCLUDE ({left_out}) FROM {{jobs}}")
    history = History(tmp_path)
    assert history.jobs() == [dataclasses.replace(job, seed=0, nodes=(), objective=None) for job in jobs]
    assert history.left_out == ()


@pytest.mark.parametrize(
    ("jobs_sql", "marks", "said"),
    [
        ("SELECT *, 1 AS colour FROM {jobs}", "roadfuse_schema: '1'", "has column colour, which this version does not"),
        ("SELECT * FROM {jobs}", "roadfuse_schema: '2'", "is of schema 2, this version reads 1"),
        ("SELECT * FROM {jobs}", "other: '1'", "is of schema unknown, this version reads 1"),
        ("SELECT * EXCLUDE (model) FROM {jobs}", "roadfuse_schema: '1'", "has no column model"),
    ],
)
def test_files_of_a_newer_version_are_named_and_left_out(tmp_path: Path, jobs_sql: str, marks: str, said: str) -> None:
    history = History(tmp_path)
    history.append_night(night_record(), [job_record()])
    rewrite(partition(history, "2026-11-30"), jobs_sql, marks)
    history = History(tmp_path)
    assert history.jobs() == [] and len(history.left_out) == 1 and said in history.left_out[0]


def test_a_night_keeps_to_its_own_folder(tmp_path: Path) -> None:
    for name in ("../2026-11-30", "", ".x", "a/b"):
        with pytest.raises(UserError, match="a name is of letters, digits, dots and dashes"):
            History(tmp_path).append_night(night_record(name), [])
    with pytest.raises(ValueError, match="jobs of night 2026-11-29 among its own"):
        History(tmp_path).append_night(night_record(), [job_record("2026-11-29")])
    assert list(tmp_path.rglob("*.parquet")) == []


def test_a_full_disk_leaves_the_earlier_partition(small_disk: Path) -> None:
    history = History(small_disk)
    jobs = [job_record(number=number) for number in range(3)]
    history.append_night(night_record(), jobs)
    with (small_disk / "filler").open("wb") as file, pytest.raises(OSError, match="No space"):
        while True:
            os.write(file.fileno(), bytes(4096))
    with pytest.raises(UserError, match=r"records/night=2026-11-30.* cannot be written .*make room there"):
        history.append_night(night_record(), [job_record(log_tail=random.Random(0).randbytes(4000).hex())])
    assert History(small_disk).jobs() == jobs
    assert sorted(path.name for path in partition(history, "2026-11-30").iterdir()) == ["jobs.parquet", "night.parquet"]


WRITE_AGAIN_AND_AGAIN = """
import sys
from pathlib import Path
from sweeps.ledger.history import History
from tests.sweeps.test_history import job_record, night_record
for turn in range(10**6):
    count = 1 + turn % 2 * 2000
    History(Path(sys.argv[1])).append_night(
        night_record(num_planned=count), [job_record(number=number) for number in range(count)]
    )
    print(turn, flush=True)
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_a_whole_partition(tmp_path: Path) -> None:
    """At any moment: the last or the one before, never a mixture; an unfinished one would be named."""
    draw = random.Random(0)
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITE_AGAIN_AND_AGAIN, str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stdout.readline()
        time.sleep(draw.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        history = History(tmp_path)
        nights, jobs = history.nights(), history.jobs()
        assert len(nights) + len(history.left_out) == 1
        assert len(jobs) == (nights[0].num_planned if nights else 0)
    History(tmp_path).append_night(night_record(), [])
    assert sorted(path.name for path in partition(History(tmp_path), "2026-11-30").iterdir()) == [
        "jobs.parquet",
        "night.parquet",
    ]


@pytest.mark.slow
def test_thirty_nights_of_a_thousand_jobs_are_read_fast(tmp_path: Path) -> None:
    draw = random.Random(0)
    history = History(tmp_path)
    for place in range(30):
        name = f"2026-11-{place + 1:02d}"
        jobs = [
            job_record(
                name,
                number,
                parameters={"optim.lr": draw.random(), "optim.weight_decay": draw.random()},
                metrics={f"metric_{index}": draw.random() for index in range(6)},
                lost_scaling={"data": draw.random()},
                log_tail=draw.randbytes(1000).hex() if number % 10 == 0 else "",
                nodes=("dgx1", "dgx2"),
                command=f"python -m pipelines train lane-small --set optim.lr={draw.random()}",
            )
            for number in range(1000)
        ]
        history.append_night(night_record(name, place * DAY), jobs)
    began = time.process_time()
    assert len(History(tmp_path).jobs()) == 30_000
    seconds = time.process_time() - began
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.parquet"))
    print(f"30,000 jobs read in {seconds:.2f} s of processor time from {size / 1e6:.1f} MB")
    assert seconds < 2
