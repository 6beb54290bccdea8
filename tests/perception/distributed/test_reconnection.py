"""Leaving the other ranks and joining them again in the same process: it works, or says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.perception.distributed import reconnecting_rank
from tests.perception.distributed.scenario_tools import LOCAL_REDUCTION_VARIABLE
from tests.perception.distributed.test_failures import on_every_engine
from tests.ranks import launch_script

pytestmark = pytest.mark.slow


@on_every_engine
@pytest.mark.parametrize("ranks", [2, 4])
def test_connect_again(
    engine: str,
    transport: str,
    local_reduction: str,
    ranks: int,
    tmp_path: Path,
) -> None:
    launched = launch_script(
        Path(reconnecting_rank.__file__),
        [engine, transport, "30", "3"],
        ranks,
        engine,
        transport,
        tmp_path,
        timeout_seconds=120,
        environment={LOCAL_REDUCTION_VARIABLE: local_reduction},
    )
    expected = f"sum {ranks * (ranks + 1) // 2}, mean {(ranks + 1) / 2:g}"
    rounds = launched.output.splitlines()
    assert rounds[0] == f"round 0: {expected}", launched.errors
    if engine == "horovod":
        assert launched.exit_code == 2, launched.errors
        assert "again" in launched.errors and launched.errors.startswith("error: ") and len(rounds) == 1
        return
    assert launched.exit_code == 0, launched.errors
    assert rounds == [f"round {number}: {expected}" for number in range(3)]
