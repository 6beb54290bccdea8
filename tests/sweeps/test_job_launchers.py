"""The contract of launchers, over the slots of this host and over a real Slurm that the tests start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perception.errors import UserError
from sweeps.job import Job
from sweeps.launchers.launcher import Launcher, LauncherError, NoLauncher
from sweeps.launchers.local import LocalLauncher
from sweeps.launchers.slurm import SlurmLauncher, SlurmPatience
from sweeps.night.failures import classify
from sweeps.planning.plan import SlurmSettings
from tests import slurm_cluster
from tests.sweeps.launcher_contract import Contract, Make, alive, make_job, result, status_when, told, wait_for
from tests.sweeps.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    slurm_cluster.need()
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_cluster.slurm_cluster(folder, 2, port=16917, gpus_per_node=8, return_to_service=0) as environment:
        yield environment


PATIENCE = SlurmPatience(poll=0.2, accounting=0.5, settle=15.0, lost=3.0, nodes=0.5, releases=1)


class TestLocal(Contract):
    @pytest.fixture
    def make(self) -> Make:
        return lambda folder, secret_variables=(): LocalLauncher(
            2,
            folder / "launcher",
            grace_seconds=0.5,
            host_folder=folder / "seats",
            secret_variables=secret_variables,
        )

    def test_a_job_has_its_slots_or_none(self, make: Make, tmp_path: Path) -> None:
        launcher = make(tmp_path)
        first = make_job(tmp_path, "night.first.1", 60)
        wide = make_job(tmp_path, "night.wide.1", 0.1, ranks_per_node=2)
        launcher.submit(first)
        launcher.submit(wide)
        assert launcher.poll()[wide.name].state == "pending"
        assert launcher.poll()[wide.name].allocated_seconds == 0
        launcher.cancel(first.name)
        status_when(launcher, wide.name, "ended")
        first_end = launcher.poll()[first.name].ended_utc
        wide_begin = launcher.poll()[wide.name].started_utc
        assert first_end is not None and wide_begin is not None and wide_begin >= first_end

    def test_more_ranks_than_slots_are_refused(self, make: Make, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="needs 4 slots, but this host has 2"):
            make(tmp_path).submit(make_job(tmp_path, "night.a.1", 0, num_nodes=2, ranks_per_node=2))

    def test_ranks_cores_and_threads_are_told(self, make: Make, tmp_path: Path) -> None:
        launcher = make(tmp_path)
        jobs = [make_job(tmp_path, f"night.{name}.1", 0.3, starts_ranks=True) for name in "ab"]
        launcher.submit_many(jobs)
        for job in jobs:
            status_when(launcher, job.name, "ended")
        seen = [told(job) for job in jobs]
        assert [each["ranks"] for each in seen] == [1, 1]
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > 1:
            assert not set(seen[0]["cores"]) & set(seen[1]["cores"])
        assert set(seen[0]["cores"]) | set(seen[1]["cores"]) == set(cores)
        assert [each["session"] for each in seen] == [each["pid"] for each in seen]

    def test_a_time_limit_is_kept_without_a_controller(self, make: Make, tmp_path: Path) -> None:
        launcher = make(tmp_path)
        pids = {name: tmp_path / f"{name}.pid" for name in ("polite", "stubborn")}
        for name, action in (("polite", "exit 75"), ("stubborn", ":")):
            # A shell, which is there at once, so that the limit can be short.
            script = f"trap '{action}' TERM; echo $$ > {pids[name]}; while true; do sleep 0.05; done"
            argv = ("bash", "-c", script)
            launcher.submit(Job(f"night.{name}.1", argv, tmp_path / name, starts_ranks=False, time_limit_seconds=1.0))
        launcher.close()
        for path in pids.values():
            wait_for(lambda path=path: path.exists() and path.read_text().strip(), "start")
        wait_for(lambda: not any(alive(int(path.read_text())) for path in pids.values()), "end", 20)
        successor = make(tmp_path)
        successor.adopt("night.")
        polite = status_when(successor, "night.polite.1", "ended")
        stubborn = status_when(successor, "night.stubborn.1", "ended")
        assert (polite.reason, polite.exit_code) == ("TIMEOUT", 75)
        assert (stubborn.reason, stubborn.exit_code) == ("TIMEOUT", 128 + signal.SIGKILL)

    def test_a_waiting_job_is_taken_over_and_one_cancelled_while_it_waits_never_runs(
        self, make: Make, tmp_path: Path
    ) -> None:
        launcher = make(tmp_path)
        full = make_job(tmp_path, "night.full.1", 60, ranks_per_node=2)
        waiting = make_job(tmp_path, "night.waiting.1", 0)
        never = make_job(tmp_path, "night.never.1", 0)
        launcher.submit_many([full])
        launcher.submit_many([waiting, never])
        launcher.cancel(never.name)
        assert launcher.poll()[never.name].reason == "CANCELLED"
        successor = make(tmp_path)
        adopted = successor.adopt("night.")
        assert [adopted[job.name].state for job in (full, waiting, never)] == ["running", "pending", "ended"]
        successor.cancel(full.name)
        assert status_when(successor, waiting.name, "ended").exit_code == 0
        assert not (never.run_folder / "starts.txt").exists()

    def test_what_a_job_leaves_behind_ends_with_it(self, make: Make, tmp_path: Path) -> None:
        launcher = make(tmp_path)
        pid_file = tmp_path / "pid"
        script = f"setsid sleep 600 & echo $! > {pid_file}; exit 5"
        job = Job("night.a.1", ("bash", "-c", script), tmp_path / "run", starts_ranks=False)
        launcher.submit(job)
        assert status_when(launcher, job.name, "ended").exit_code == 5
        assert not alive(int(pid_file.read_text()))

    def test_a_killed_keeper_takes_its_job_with_it_and_the_job_is_lost(self, make: Make, tmp_path: Path) -> None:
        launcher = make(tmp_path)
        job = make_job(tmp_path, "night.a.1", 60)
        id = launcher.submit(job)
        wait_for((job.run_folder / "told.json").exists, "start")
        os.kill(int(id.partition("@")[0]), signal.SIGKILL)
        status = status_when(launcher, job.name, "lost")
        assert status.exit_code is None
        wait_for(lambda: not alive(told(job)["pid"]), "end of the process")

    def test_a_process_that_has_the_number_of_a_keeper_now_is_left_alone(self, make: Make, tmp_path: Path) -> None:
        """Neither signalled nor taken for the job."""
        launcher = make(tmp_path)
        job = make_job(tmp_path, "night.a.1", 60)
        launcher.submit(job)
        wait_for((job.run_folder / "told.json").exists, "start")
        record = tmp_path / "launcher" / "night.a.1.run.json"
        content = json.loads(record.read_text())
        bystander = subprocess.Popen(["sleep", "600"])
        try:
            record.write_text(json.dumps({**content, "keeper": [bystander.pid, 1]}))
            successor = make(tmp_path)
            successor.adopt("night.")
            successor.cancel(job.name)
            time.sleep(0.3)
            assert bystander.poll() is None
        finally:
            bystander.kill()
            bystander.wait()
            launcher.cancel(job.name)
            status_when(launcher, job.name, "ended")

    def test_a_program_that_does_not_exist_ends_with_127(self, make: Make, tmp_path: Path) -> None:
        launcher = make(tmp_path)
        launcher.submit(Job("night.a.1", ("/no/such/program",), tmp_path / "run"))
        status = status_when(launcher, "night.a.1", "ended")
        assert status.exit_code == 127
        assert "could not be started" in status.reason and "/no/such/program" in status.reason

    @pytest.mark.slow
    def test_jobs_outlive_a_controller_that_is_killed(self, make: Make, tmp_path: Path) -> None:
        """A controller in a process of its own, killed as soon as it has submitted; four times over one folder."""
        script = (
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "from pathlib import Path\n"
            "from tests.sweeps.launcher_contract import make_job\n"
            "from sweeps.launchers.local import LocalLauncher\n"
            "folder = Path(sys.argv[2])\n"
            "launcher = LocalLauncher(2, folder / 'launcher', host_folder=folder / 'seats')\n"
            "launcher.adopt('night.')\n"
            "jobs = [make_job(folder, f'night.{n}.1', 0.05) for n in range(6)]\n"
            "for job in jobs:\n"
            "    launcher.submit(job)\n"
            "print('submitted', flush=True)\n"
            "while True: launcher.poll()\n"
        )
        for turn in range(4):
            controller = subprocess.Popen(
                [sys.executable, "-c", script, str(ROOT), str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT
            )
            assert controller.stdout is not None
            with controller.stdout:
                if turn:
                    controller.stdout.readline()
                else:
                    wait_for(lambda: list((tmp_path / "launcher").glob("*.lock")), "first start")
            controller.kill()
            controller.wait()
        launcher = make(tmp_path)
        launcher.adopt("night.")
        for number in range(6):
            job = make_job(tmp_path, f"night.{number}.1", 0.05)
            launcher.submit(job)
            assert status_when(launcher, job.name, "ended").exit_code == 0
            assert len((job.run_folder / "starts.txt").read_text().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.services
class TestSlurm(Contract):
    @pytest.fixture
    def make(self, slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Make:
        monkeypatch.setenv("SLURM_CONF", slurm["SLURM_CONF"])
        monkeypatch.setenv("PATH", slurm["PATH"])
        chosen = SlurmSettings(partition="nightly", gpus_per_node=8, grace_seconds=5)
        return lambda folder, secret_variables=(): SlurmLauncher(
            chosen, folder / "launcher", PATIENCE, secret_variables
        )

    def test_ranks_on_two_nodes(self, make: Make, tmp_path: Path) -> None:
        launcher = make(tmp_path)
        assert (launcher.num_nodes(), launcher.num_slots(), launcher.hardware()) == (2, 16, "8 x h100")
        job = make_job(tmp_path, "night.a.1", 0.2, num_nodes=2, ranks_per_node=2, starts_ranks=True)
        launcher.submit(job)
        status = status_when(launcher, job.name, "ended")
        assert status.exit_code == 0
        assert status.nodes == ("node0", "node1")
        seen = [json.loads(path.read_text()) for path in job.run_folder.glob("told*.json")]
        assert sorted(each["rank"] for each in seen) == [0, 1, 2, 3]
        assert {each["node"] for each in seen} == {"node0", "node1"}
        assert all(each["gpus"] == "0,1,2,3,4,5,6,7" for each in seen)

    def test_a_plan_that_slurm_refuses_is_the_users_mistake(self, make: Make, tmp_path: Path) -> None:
        make(tmp_path)
        launcher = SlurmLauncher(SlurmSettings(partition="nightli"), tmp_path / "launcher", PATIENCE)
        with pytest.raises(UserError, match=r"invalid partition.*slurm\.partition"):
            launcher.submit(make_job(tmp_path, "night.a.1", 0))
        assert launcher.adopt("night.") == {}

    def test_a_scheduler_that_is_away_loses_nothing(self, make: Make, tmp_path: Path, slurm: dict[str, str]) -> None:
        """Stopped, it takes connections and answers nobody: sbatch may or may not have been heard."""
        launcher = SlurmLauncher(
            SlurmSettings(partition="nightly"), tmp_path / "launcher", SlurmPatience(command=2.0, poll=0.2)
        )
        make(tmp_path)
        job = make_job(tmp_path, "night.a.1", 0.1)
        controller = int(Path(slurm["SLURM_CONF"]).with_name("slurmctld.pid").read_text())
        os.kill(controller, signal.SIGSTOP)
        try:
            for _ in range(2):
                with pytest.raises(LauncherError):
                    launcher.submit(job)
        finally:
            os.kill(controller, signal.SIGCONT)
        wait_for(lambda: _submits(launcher, job), "submission")
        assert status_when(launcher, job.name, "ended").exit_code == 0
        time.sleep(2)
        assert len((job.run_folder / "starts.txt").read_text().splitlines()) == 1

    def test_arrays_of_jobs_alike(self, make: Make, tmp_path: Path) -> None:
        launcher = make(tmp_path)
        odd = 'it\'s "odd" $x\n\t%j'
        jobs = [make_job(tmp_path, f"night.a-{number}.1", 0.1, number, odd) for number in range(4)]
        ids = launcher.submit_many(jobs)
        assert [id.partition("_")[2] for id in ids] == ["0", "1", "2", "3"]
        assert len({id.partition("_")[0] for id in ids}) == 1
        assert [status_when(launcher, job.name, "ended").exit_code for job in jobs] == [0, 1, 2, 3]
        # One task alone is cancelled, and the others live on.
        more = [make_job(tmp_path, f"night.b-{number}.1", 3 + 57 * (number == 1)) for number in range(2)]
        launcher.submit_many(more)
        wait_for((more[1].run_folder / "told.json").exists, "start")
        launcher.cancel(more[1].name)
        assert status_when(launcher, more[1].name, "ended").reason == "CANCELLED"
        assert status_when(launcher, more[0].name, "ended").exit_code == 0

    def test_a_preempted_job_is_queued_again_under_its_number(self, make: Make, tmp_path: Path) -> None:
        launcher = make(tmp_path)
        job = make_job(tmp_path, "night.a.1", 8, time_limit_seconds=1800)
        id = launcher.submit(job)
        wait_for((job.run_folder / "told.json").exists, "start")

        def is_in_the_account() -> bool:
            # Slurm counts whole seconds: of a start that is shorter nothing could be seen.
            started_utc = launcher.poll()[job.name].started_utc
            return started_utc is not None and time.time() > started_utc + 2

        wait_for(is_in_the_account, "two seconds of the first start")
        subprocess.run(["scancel", "--batch", "--signal=USR2", id], check=True)
        wait_for((job.run_folder / "result.json").exists, "checkpoint")
        assert result(job) == "preempted"
        (job.run_folder / "told.json").unlink()
        wait_for((job.run_folder / "told.json").exists, "second start", 60)
        assert told(job)["restarts"] == 1
        status = status_when(launcher, job.name, "ended")
        assert (status.id, status.num_starts, status.exit_code) == (id, 2, 0)
        assert status.ended_utc is not None and status.started_utc is not None
        # The first start is in the account too, the time between the two is not.
        assert status.allocated_seconds > status.ended_utc - status.started_utc

    def test_a_job_makes_way_for_a_more_important_one_and_goes_on(self, make: Make, tmp_path: Path) -> None:
        """Slurm itself preempts: it signals, and after a grace it would kill."""
        important = make(tmp_path)
        chosen = SlurmSettings(partition="scavenge", gpus_per_node=8, grace_seconds=5)
        launcher = SlurmLauncher(chosen, tmp_path / "scavenge", PATIENCE)
        job = make_job(tmp_path, "night.a.1", 8, num_nodes=2, time_limit_seconds=1800)
        launcher.submit(job)
        wait_for((job.run_folder / "told.json").exists, "start")
        launcher.poll()
        other = make_job(tmp_path, "night.b.1", 2, num_nodes=2)
        important.submit(other)
        wait_for((job.run_folder / "result.json").exists, "checkpoint", 60)
        assert result(job) == "preempted"
        states = set()
        while (status := launcher.poll()[job.name]).state not in ("ended", "lost"):
            states.add(status.state)
            time.sleep(0.1)
        assert status_when(important, other.name, "ended").exit_code == 0
        assert (status.exit_code, status.num_starts, result(job)) == (0, 2, "finished")
        assert states <= {"pending", "running"}

    def test_a_failed_node_is_no_end(self, make: Make, tmp_path: Path) -> None:
        launcher = make(tmp_path)
        job = make_job(tmp_path, "night.a.1", 4)
        id = launcher.submit(job)
        wait_for((job.run_folder / "told.json").exists, "start")
        node = status_when(launcher, job.name, "running").nodes[0]
        (job.run_folder / "told.json").unlink()
        subprocess.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=test"], check=True)
        try:
            wait_for(lambda: launcher.num_nodes() == 1, "failed node")
            states = set()
            while (status := launcher.poll()[job.name]).state not in ("ended", "lost"):
                states.add(status.state)
                time.sleep(0.1)
        finally:
            subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=True)
        assert states <= {"pending", "running"}
        assert (status.id, status.exit_code, status.num_starts) == (id, 0, 2)
        assert status.nodes != (node,)

    def test_a_job_that_is_held_because_its_launch_failed_is_released(
        self, make: Make, tmp_path: Path, slurm: dict[str, str]
    ) -> None:
        """A node that cannot start jobs: Slurm holds the job until somebody releases it.

        Where Slurm takes the node out of service the job runs on the other one; where it does not, and no accounting
        tells which node it was, the job is given up after its releases, as a failure of a node.
        """
        launcher = make(tmp_path)
        spool = Path(slurm["SLURM_CONF"]).with_name("spool-node0")
        aside = spool.with_name("spool-aside")
        # No other node could take the job, whatever still is being cleared.
        subprocess.run(["scontrol", "update", "nodename=node1", "state=drain", "reason=test"], check=True)
        spool.rename(aside)
        spool.write_text("")
        try:
            job = make_job(tmp_path, "night.a.1", 0.2)
            id = launcher.submit(job)
            # So it stays until the launcher looks.
            wait_until(lambda: "held" in _reason(id), "a held job", lambda: _reason(id))
            subprocess.run(["scontrol", "update", "nodename=node1", "state=resume"], check=True)
            assert launcher.poll()[job.name].reason.replace("_", " ") == "launch failed requeued held"
            status = status_when(launcher, job.name, "ended", "lost")
        finally:
            spool.unlink()
            aside.rename(spool)
            for node in ("node0", "node1"):
                # Refused for a node that is in service.
                resume = ["scontrol", "update", f"nodename={node}", "state=resume"]
                subprocess.run(resume, check=False, capture_output=True)
        if status.reason == "launch failed requeued held":
            assert status.num_starts == 1 + PATIENCE.releases
            assert not (job.run_folder / "starts.txt").exists()
            assert classify(job.run_folder, status).failure == "node"
        else:
            assert (status.exit_code, status.nodes) == (0, ("node1",)), status

    def test_an_excluded_node_gets_no_job(self, make: Make, tmp_path: Path) -> None:
        launcher = make(tmp_path)
        launcher.exclude(["node0"])
        jobs = [make_job(tmp_path, f"night.{name}.1", 0.1) for name in "abc"]
        launcher.submit_many(jobs)
        assert {status_when(launcher, job.name, "ended").nodes for job in jobs} == {("node1",)}
        assert launcher.num_nodes() == 1

    def test_without_json_the_states_are_the_same(
        self, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A squeue that was built without JSON: scontrol tells as much."""
        programs = tmp_path / "programs"
        programs.mkdir()
        (programs / "squeue").write_text("#!/bin/sh\necho 'squeue: unrecognized option --json' >&2\nexit 1\n")
        (programs / "squeue").chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        launcher = make(tmp_path)
        jobs = [make_job(tmp_path, f"night.{number}.1", 0.5, number) for number in range(3)]
        launcher.submit_many(jobs)
        statuses = [status_when(launcher, job.name, "ended") for job in jobs]
        assert [status.exit_code for status in statuses] == [0, 1, 2]
        for status in statuses:
            assert status.started_utc is not None and abs(status.started_utc - time.time()) < 120
            assert len(status.nodes) == 1

    def test_a_job_that_slurm_forgot_is_lost_after_a_grace(self, make: Make, tmp_path: Path) -> None:
        launcher = make(tmp_path)
        job = make_job(tmp_path, "night.a.1", 0)
        launcher.submit(job)
        status_when(launcher, job.name, "ended")
        folder = tmp_path / "launcher"
        (folder / "ended.jsonl").unlink()
        path = folder / "night.a.1.batch.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "number": 999_999}))
        successor = make(tmp_path)
        assert successor.adopt("night.")[job.name].state == "pending"
        assert status_when(successor, job.name, "lost").exit_code is None


def _reason(id: str) -> str:
    """Why Slurm does not start the job."""
    return subprocess.run(
        ["squeue", "--noheader", "--format=%r", f"--jobs={id}"], check=True, capture_output=True, text=True
    ).stdout.strip()


def _submits(launcher: Launcher, job: Job) -> bool:
    try:
        launcher.submit(job)
    except LauncherError:
        return False
    return True


def test_the_launcher_without_slots_takes_nothing(tmp_path: Path) -> None:
    launcher = NoLauncher()
    assert (launcher.num_slots(), launcher.num_nodes(), launcher.poll(), launcher.adopt("")) == (0, 0, {}, {})
    with pytest.raises(UserError, match="no slots"):
        launcher.submit(make_job(tmp_path, "a", 0))
