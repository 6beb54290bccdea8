"""A night of real controller processes over a real Slurm: controllers killed, jobs queued again, a node that fails."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from sweeps.ledger.history import History
from sweeps.night.night import find_nights
from tests import slurm_cluster
from tests.sweeps.test_night import command, num_lines, state_of, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.services]
ROOT = Path(__file__).resolve().parents[2]
NUM_NODES, NUM_TRIALS, NUM_KILLS = 8, 24, 5
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
    slurm_cluster.need(accounting=True)
    plan, root = tmp_path / "night.toml", tmp_path / "nights"
    plan.write_text(PLAN)
    chance = random.Random(5)
    with slurm_cluster.slurm_cluster(
        tmp_path / "slurm", NUM_NODES, port=17417, gpus_per_node=2, accounting=True, return_to_service=0
    ) as cluster:
        environment = {**cluster, "PYTHONPATH": str(ROOT), "STAND_IN_SECONDS": "12"}
        for name in ("SLURM_CONF", "PATH"):
            monkeypatch.setenv(name, cluster[name])

        def begin(*more: str) -> subprocess.Popen[str]:
            words = command("nightly", plan, "--root", root, *more)
            return subprocess.Popen(
                words, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )

        process = begin()
        wait_for(lambda: root.is_dir() and find_nights(root))
        journal = find_nights(root)[0].folder.journal
        outs = []
        for turn in range(NUM_KILLS):
            due = num_lines(journal) + chance.randint(2, 20)
            wait_for(lambda due=due, process=process: num_lines(journal) >= due or process.poll() is not None, 200)
            if turn < 3:
                _requeue_one(chance)
            if turn == 2:
                _slurm("scontrol", "update", "nodename=node3", "state=down", "reason=test")
            process.kill()
            outs.append(process.communicate()[0])
            process = begin("--resume")
        outs.append(process.communicate(timeout=600)[0])
        said = "\n".join(outs)
        assert process.returncode == 0, said
        state = state_of(root)
        records = state.records
        assert state.closed is not None and state.num_controller_starts == NUM_KILLS + 1, said
        assert Counter(record.kind for record in records) == {"trial": NUM_TRIALS, "default": 2, "champion": 1}
        assert {record.status for record in records} <= {"finished", "answered"}, said
        assert max(record.num_starts for record in records) > 1, said
        assert not _slurm("squeue", "--noheader").strip()
        # No attempt was started twice under another number of Slurm's.
        time.sleep(6)
        listed = _slurm(
            "sacct", "--allocations", "--duplicates", "--noheader", "--parsable2",
            "--format=JobID,JobName,ElapsedRaw", "--starttime=now-1hour",
        )  # fmt: skip
        rows = [line.split("|") for line in listed.split()]
        numbers = {number for number, _, _ in rows}
        assert len(numbers) == sum(len(job.attempts) for job in state.jobs.values())
        slurms = 2 * sum(int(seconds) for _, _, seconds in rows)
        ours = sum(record.rank_seconds_allocated for record in records)
        assert abs(ours - slurms) <= 0.02 * slurms, (ours, slurms, said)
        for record in records:
            assert 0 <= record.rank_seconds_wasted <= record.rank_seconds_allocated
    assert len(History(root).jobs()) == len(records)


def _requeue_one(chance: random.Random) -> None:
    """As a preemption does: the same job starts again, under the same number."""
    running = _slurm("squeue", "--noheader", "--states=RUNNING", "--format=%A").split()
    if running:
        subprocess.run(["scontrol", "requeue", chance.choice(running)], check=False, env=os.environ)


def _slurm(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, env=os.environ).stdout
