"""What every launcher is held to, and jobs to hold it with; the classes of test_launchers.py say over which."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

import pytest

from perception.errors import UserError
from sweeps.job import Job, JobStatus
from sweeps.launchers.launcher import Launcher

JOB = Path(__file__).with_name("launched_job.py")


def make_job(folder: Path, name: str, *words: object, **fields: Any) -> Job:
    """A job that sleeps so many seconds and ends with a code."""
    run_folder = folder / "runs" / name
    argv = (sys.executable, str(JOB), str(run_folder), *map(str, words))
    return Job(name, argv, run_folder, **{"starts_ranks": False, "time_limit_seconds": 600.0, **fields})


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"no {what} after {seconds:.0f} s"
        time.sleep(0.05)
    return value


def status_when(launcher: Launcher, name: str, *states: str, seconds: float = 60.0) -> JobStatus:
    def look() -> JobStatus | None:
        status = launcher.poll()[name]
        return status if status.state in states else None

    found = wait_for(look, f"state {states} of {name}, but {launcher.poll()[name]}", seconds)
    assert isinstance(found, JobStatus)
    return found


def told(job: Job) -> dict[str, Any]:
    return dict(json.loads((job.run_folder / "told.json").read_text()))


def result(job: Job) -> str:
    return str(json.loads((job.run_folder / "result.json").read_text())["status"])


def alive(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Make(Protocol):
    def __call__(self, folder: Path, secret_variables: Collection[str] = ()) -> Launcher: ...


class Contract:
    """What a controller relies on, of any launcher with 2 slots or more."""

    @pytest.fixture
    def make(self) -> Make:
        raise NotImplementedError

    def test_a_job_runs_and_ends(self, make: Make, tmp_path: Path) -> None:
        launcher = make(tmp_path)
        job = make_job(tmp_path, "night.a.1", 0.1, environment={"MARK": "it's $HOME"})
        id = launcher.submit(job)
        assert id
        status = status_when(launcher, job.name, "ended")
        assert (status.exit_code, status.reason, status.num_starts) == (0, "exit code 0", 1)
        assert status.started_utc is not None and status.ended_utc is not None
        assert status.ended_utc >= status.started_utc > time.time() - 120
        assert 0 <= status.allocated_seconds <= status.ended_utc - status.started_utc + 0.01
        assert len(status.nodes) == 1
        assert result(job) == "finished"
        assert told(job)["mark"] == "it's $HOME"
        assert "the job runs" in (job.run_folder / "job.log").read_text()

    def test_the_exit_code_is_told(self, make: Make, tmp_path: Path) -> None:
        launcher = make(tmp_path)
        job = make_job(tmp_path, "night.a.1", 0, 3)
        launcher.submit(job)
        status = status_when(launcher, job.name, "ended")
        assert (status.exit_code, status.reason) == (3, "exit code 3")
        assert "error: it was told to fail" in (job.run_folder / "job.log").read_text()

    def test_a_name_submitted_again_starts_nothing(self, make: Make, tmp_path: Path) -> None:
        launcher = make(tmp_path)
        job = make_job(tmp_path, "night.a.1", 0.1)
        launcher.submit(job)
        status_when(launcher, job.name, "running", "ended")
        assert launcher.submit(job) == launcher.submit_many([job, job])[0]
        status_when(launcher, job.name, "ended")
        launcher.submit(job)
        launcher.poll()
        time.sleep(0.5)
        assert launcher.poll()[job.name].state == "ended"
        assert len((job.run_folder / "starts.txt").read_text().splitlines()) == 1

    def test_many_are_submitted_in_their_order(self, make: Make, tmp_path: Path) -> None:
        launcher = make(tmp_path)
        jobs = [make_job(tmp_path, f"night.a-{number}.1", 0.1, number) for number in range(5)]
        ids = launcher.submit_many(jobs)
        assert len(ids) == 5
        codes = [status_when(launcher, job.name, "ended").exit_code for job in jobs]
        assert codes == [0, 1, 2, 3, 4]

    def test_a_cancelled_job_writes_its_checkpoint_first(self, make: Make, tmp_path: Path) -> None:
        launcher = make(tmp_path)
        job = make_job(tmp_path, "night.a.1", 60)
        launcher.submit(job)
        wait_for((job.run_folder / "told.json").exists, "start")
        launcher.cancel(job.name)
        status = status_when(launcher, job.name, "ended")
        assert status.reason == "CANCELLED"
        assert result(job) == "preempted"
        # Once more, and of what is not known: nothing happens.
        launcher.cancel(job.name)
        launcher.cancel("night.unknown.1")

    def test_a_job_that_takes_no_notice_is_ended_by_force(self, make: Make, tmp_path: Path) -> None:
        launcher = make(tmp_path)
        job = make_job(tmp_path, "night.a.1", "stubborn")
        launcher.submit(job)
        wait_for((job.run_folder / "told.json").exists, "start")
        launcher.cancel(job.name)
        assert status_when(launcher, job.name, "ended").reason == "CANCELLED"
        wait_for(lambda: not alive(told(job)["pid"]), "end of the process")

    def test_another_controller_takes_over(self, make: Make, tmp_path: Path) -> None:
        """What ran, what had ended and what waited; of this night only."""
        launcher = make(tmp_path)
        running = make_job(tmp_path, "night.running.1", 60)
        ended = make_job(tmp_path, "night.ended.1", 0, 4)
        other = make_job(tmp_path, "night2.other.1", 0)
        launcher.submit_many([ended, other])
        status_when(launcher, ended.name, "ended")
        launcher.submit(running)
        wait_for((running.run_folder / "told.json").exists, "start")
        before = {name: status_when(launcher, name, "running") for name in [running.name]}
        launcher.close()

        successor = make(tmp_path)
        assert successor.poll() == {}
        adopted = successor.adopt("night.")
        assert set(adopted) == {running.name, ended.name}
        assert adopted[ended.name].exit_code == 4
        assert adopted[running.name].state == "running"
        assert adopted[running.name].id == before[running.name].id
        assert adopted[running.name].started_utc == pytest.approx(before[running.name].started_utc, abs=1.0)
        assert successor.submit(running) == before[running.name].id
        successor.cancel(running.name)
        assert status_when(successor, running.name, "ended").reason == "CANCELLED"
        assert len((running.run_folder / "starts.txt").read_text().splitlines()) == 1

    def test_a_job_that_ended_while_no_controller_lived_is_known(self, make: Make, tmp_path: Path) -> None:
        launcher = make(tmp_path)
        job = make_job(tmp_path, "night.a.1", 0.5, 7)
        launcher.submit(job)
        status_when(launcher, job.name, "running", "ended")
        launcher.close()
        time.sleep(1.5)
        successor = make(tmp_path)
        successor.adopt("night.")
        status = status_when(successor, job.name, "ended")
        assert (status.exit_code, status.num_starts) == (7, 1)
        assert status.allocated_seconds < 30

    def test_a_job_sees_the_environment_without_its_secrets(
        self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nor do they stand in any file of the launcher."""
        secrets = {"SWEEPS_STORAGE_URL": "postgresql://us:not-to-be-shown@host/trials", "CHAT_URL": "not-to-be-shown"}
        for name, value in {**secrets, "PLAIN_SETTING": "inherited as it is"}.items():
            monkeypatch.setenv(name, value)
        launcher = make(tmp_path, secret_variables=tuple(secrets))
        jobs = [
            Job(f"night.{name}.1", ("env",), tmp_path / name, starts_ranks=False, time_limit_seconds=600.0)
            for name in ("a", "b")
        ]
        launcher.submit_many(jobs)
        for job in jobs:
            assert status_when(launcher, job.name, "ended").exit_code == 0
            log = (job.run_folder / "job.log").read_text()
            assert "PLAIN_SETTING=inherited as it is" in log
            assert not any(name in log for name in secrets) and "not-to-be-shown" not in log
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert not [path for path in files if b"not-to-be-shown" in path.read_bytes()]

    def test_what_it_is_made_of_is_told(self, make: Make, tmp_path: Path) -> None:
        launcher = make(tmp_path)
        assert launcher.num_slots() >= 2
        assert launcher.num_nodes() >= 1
        assert launcher.hardware()

    @pytest.mark.parametrize("name", ["", "a b", "a/b", "-a", "a%j"])
    def test_a_name_that_no_scheduler_takes_is_refused(self, make: Make, tmp_path: Path, name: str) -> None:
        with pytest.raises(UserError, match="job name"):
            make(tmp_path).submit(Job(name, ("true",), tmp_path / "run"))
