"""Ranks of test_replay.py: replayed_ranks.py FOLDER ENGINE TRANSPORT writes what each rank saw."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from perception.config import DistributedConfig
from perception.distributed import Communicator, connect, distribute
from perception.replay import ReplayedSteps, ReplayModel, replay_steps
from perception.scaling.profile import GradientReady, StepProfile

BUCKETS = DistributedConfig(first_bucket_mib=0.004, bucket_mib=0.008)
"""Two tiny gradients in each bucket."""
LARGE = 8_000_000
SLOW_FACTOR = 1.5


def schedule(sizes: Sequence[int], pace: float = 1.0) -> StepProfile:
    """Forward 50 ms, backward 200 ms with gradients evenly spread to its end, optimizer 10 ms."""
    gradients = tuple(
        GradientReady(f"layer{index}.weight", size, 4, pace * 0.2 * (index + 1) / len(sizes))
        for index, size in enumerate(sizes)
    )
    return StepProfile("layers", "a test", "fp32", 4, pace * 0.05, pace * 0.2, pace * 0.01, gradients)


TINY = [1000] * 20


def errors_of_means(communicator: Communicator) -> list[float]:
    """Largest difference of each reduced gradient from the mean over ranks of what they were given."""
    profile = schedule([1, 0, 1000, 77, 4096])
    model = ReplayModel(profile, seed=communicator.rank)
    reducer = distribute(model, None, communicator, BUCKETS)
    for _ in range(2):
        model.begin_step()
        reducer.zero_grad()
        reducer.backward(model(), num_samples=1.0)
        reducer.finish()
    errors = []
    for parameter, own in zip(reversed(list(model.parameters())), model.own_gradients, strict=True):
        assert parameter.grad is not None
        error = (parameter.grad - communicator.average(own)).abs()
        errors.append(float(error.max()) if error.numel() else 0.0)
    reducer.remove()
    return errors


def main(folder: Path, engine: str, transport: str) -> None:
    config = DistributedConfig(engine=engine, transport=transport)
    communicator = connect(config)
    pace = SLOW_FACTOR if communicator.rank == communicator.size - 1 else 1.0
    profiles = {
        "tiny": schedule(TINY),
        "large first": schedule([LARGE, *TINY]),
        "large last": schedule([*TINY, LARGE]),
        "one slow rank": schedule(TINY, pace),
    }
    report: dict[str, object] = {"errors of means": errors_of_means(communicator)}
    for name, profile in profiles.items():
        steps: ReplayedSteps = replay_steps(profile, communicator, BUCKETS, num_steps=12)
        report[name] = asdict(steps)
    (folder / f"rank{communicator.rank}.json").write_text(json.dumps(report))
    communicator.barrier()
    communicator.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
