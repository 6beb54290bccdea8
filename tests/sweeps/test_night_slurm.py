"""A night of real controller processes over a real Slurm: controllers killed, jobs queued again, a node that fails."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from sweeps.ledger.history import History
from sweeps.night.night import find_nights
from tests import slurm_cluster
from tests.sweeps.test_night import command, num_lines, state_of
from tests.sweeps.waiting import end, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.services]
ROOT = Path(__file__).resolve().parents[2]
NUM_NODES, NUM_TRIALS = 8, 24
NUM_KILLS = 5
UNDER_WAY = ("PENDING", "RUNNING")
PLAN = """
name = "night"
launcher = "slurm"
[budget]
max_minutes = 30
early_end = false
[slurm]
partition = "nightly"
gpus_per_node = 2
grace_seconds = 10
[retention]
min_free_gib = 0.0
[[models]]
model = "lane-small"
objectives = ["culane_f1_50"]
num_samples = 900
ranks_per_node = 2
max_trials = 24
default_repeats = 2
champion_repeats = 1
sampler = "random"
time_limit_minutes = 10
[models.space."optim.lr"]
low = 1e-4
high = 1e-2
log = true
"""


def test_kills_requeues_and_a_failed_node_lose_nothing_and_the_accounts_are_slurms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs stand at a gate, which lets through so many: the night cannot get ahead of what is done to it."""
    slurm_cluster.need(accounting=True)
    plan, root, gate = tmp_path / "night.toml", tmp_path / "nights", tmp_path / "gate"
    plan.write_text(PLAN)
    gate.mkdir()
    chance = random.Random(5)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(
            slurm_cluster.slurm_cluster(
                tmp_path / "slurm", NUM_NODES, port=17417, gpus_per_node=2, accounting=True, return_to_service=0
            )
        )
        environment = {**cluster, "PYTHONPATH": str(ROOT), "STAND_IN_SECONDS": "0.4", "STAND_IN_GATE": str(gate)}
        for name in ("SLURM_CONF", "PATH"):
            monkeypatch.setenv(name, cluster[name])

        def begin(*more: str) -> subprocess.Popen[str]:
            words = command("nightly", plan, "--root", root, *more)
            process = subprocess.Popen(
                words, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            stack.callback(end, process)
            return process

        def num_results() -> int:
            return len(state_of(root).records)

        def reach(results: int) -> None:
            wait_until(lambda: num_results() >= results, f"{results} results", num_results, process)

        process = begin()
        wait_until(lambda: root.is_dir() and find_nights(root), "a night", lambda: list(tmp_path.iterdir()), process)
        journal = find_nights(root)[0].folder.journal
        # The first kill comes while jobs are still being planned and submitted.
        due = chance.randint(2, 20)
        wait_until(lambda: num_lines(journal) >= due, f"{due} events", lambda: num_lines(journal), process)
        outs, let_through = [], 0
        for turn in range(NUM_KILLS):
            process.kill()
            outs.append(process.communicate()[0])
            process = begin("--resume")
            if turn == NUM_KILLS - 1:
                break
            reach(let_through)
            if turn < 3:
                _requeue_one(chance)
            passing = chance.randint(2, 4)
            for number in range(let_through, let_through + passing):
                (gate / f"token-{number}").touch()
            let_through += passing
            # The next one while results of those are still to come.
            reach(let_through - chance.randint(1, passing - 1))
        wait_until(lambda: _running("node3"), "a job on node3", lambda: _slurm("squeue", "--noheader"), process)
        _slurm("scontrol", "update", "nodename=node3", "state=down", "reason=test")
        (gate / "open").touch()
        outs.append(process.communicate(timeout=300)[0])
        said = "\n".join(outs)
        assert process.returncode == 0, said
        state = state_of(root)
        records = state.records
        assert state.closed is not None and state.num_controller_starts == NUM_KILLS + 1, said
        assert Counter(record.kind for record in records) == {"trial": NUM_TRIALS, "default": 2, "champion": 1}
        assert {record.status for record in records} <= {"finished", "answered"}, said
        # Three were queued again, and one was on the node that failed.
        num_starts = sum(record.num_starts for record in records)
        assert num_starts >= len(records) + 4, said
        assert not _slurm("squeue", "--noheader").strip()
        # Accounting gets starts and ends in their order: with the last end it has every other start too.
        wait_until(
            lambda: len(_accounted()) >= num_starts and not any(row[3] in UNDER_WAY for row in _accounted()),
            f"the ends of {num_starts} starts in Slurm's accounting",
            _accounted,
        )
        rows = _accounted()
        # No attempt was started twice under another number of Slurm's.
        assert len({row[0] for row in rows}) == sum(len(job.attempts) for job in state.jobs.values()), rows
        slurms = 2 * sum(int(row[2]) for row in rows)
        ours = sum(record.rank_seconds_allocated for record in records)
        assert abs(ours - slurms) <= 0.02 * slurms, (ours, slurms, said)
        for record in records:
            assert 0 <= record.rank_seconds_wasted <= record.rank_seconds_allocated
    assert len(History(root).jobs()) == len(records)


def _requeue_one(chance: random.Random) -> None:
    """As a preemption does: a job that runs starts again under the same number."""
    chosen: list[str] = []

    def is_requeued() -> bool:
        running = _running()
        if not running:
            return False
        job = chance.choice(running)
        try:
            _slurm("scontrol", "requeue", job)
        except subprocess.CalledProcessError:
            # One that passed the gate earlier has ended meanwhile; any other refusal is a fault.
            assert job not in _running(), job
            return False
        chosen.append(job)
        return True

    wait_until(is_requeued, "a job that is requeued", lambda: _slurm("squeue", "--noheader"))
    job = chosen[0]
    # Before any is let through: else this one could pass the gate in its last moment.
    wait_until(lambda: _state(job) == "PENDING", f"job {job} to be queued again", lambda: _state(job))


def _running(*nodes: str) -> list[str]:
    on = [f"--nodelist={','.join(nodes)}"] if nodes else []
    return _slurm("squeue", "--noheader", "--states=RUNNING", "--format=%i", *on).split()


def _state(job: str) -> str:
    return _slurm("squeue", "--noheader", "--format=%T", f"--jobs={job}").strip()


def _accounted() -> list[list[str]]:
    """Number, name, seconds and state of every start."""
    listed = _slurm(
        "sacct", "--allocations", "--duplicates", "--noheader", "--parsable2",
        "--format=JobID,JobName,ElapsedRaw,State", "--starttime=now-1hour",
    )  # fmt: skip
    return [line.split("|") for line in listed.splitlines()]


def _slurm(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, env=os.environ).stdout
