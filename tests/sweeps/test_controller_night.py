"""A night of many jobs through real controllers and a real Slurm; the full size is measured by
measure_controller_night.py, since it takes a quarter of an hour.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import slurm_cluster
from tests.sweeps.controller_night import Setting
from tests.sweeps.measure_controller_night import measure_troubled
from tests.sweeps.night_trouble import Trouble, problems_of


@pytest.mark.slow
@pytest.mark.services
def test_kills_preemptions_and_a_failed_node_lose_and_double_nothing(tmp_path: Path) -> None:
    slurm_cluster.need(accounting=True)
    setting = Setting(num_jobs=30, num_nodes=20, scale=0.3)
    trouble = Trouble(num_kills=3, num_failing_nodes=1, num_preemptions=3)
    _, figures, more = measure_troubled(tmp_path, setting, trouble)
    assert problems_of(figures, more, setting, trouble) == [], (figures, more)
    assert figures.submit_seconds < 30
