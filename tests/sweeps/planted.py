"""Real short trainings of the tiny lane model, night after night, with planted slowdowns, and their records.

`python planted.py FOLDER ENGINE` is one rank: it trains several times over, each time as `Trainer` does it, and each
time notes what result.json holds of throughput and lost time. Slowdowns are planted in multiples of this machine's
own step, since how long that takes here depends on what else runs.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from perception import distributed
from perception.config import override
from perception.data.lane_targets import LaneBatch, LaneExample, SampleKey
from perception.data.sample import LaneSample
from perception.distributed import Communicator
from perception.losses import Losses
from perception.run_folder import RunFolder
from perception.stopping import StopRequest
from perception.tasks import LaneTask
from perception.telemetry import SilentTelemetry
from perception.trainer import Trainer
from perception.training_run import load_sources, set_threads
from pipelines.configs import named_config
from sweeps.record import JobRecord
from tests.pipelines.training_runs import TINY
from tests.ranks import launch_script

QUIET_NIGHTS = 5
"""The last of them is compared with the others."""
REPEATS = 2
STEPS, SLOWED_STEPS = 16, 10
STEPS_LONGER = 8.0
"""A planted slowdown makes a step take so many steps more."""
SETTINGS: dict[str, Any] = {
    **TINY,
    "model.backbone_blocks": [2, 2, 2, 2],
    "data.num_train_scenes": 24,
    "data.num_validation_scenes": 2,
    # The engine's own reduction, as between hosts: ranks of one host would share memory.
    "distributed.local_reduction": "engine",
    "distributed.transport": "gloo",
}
SMALL_BUCKETS = {"distributed.first_bucket_mib": 1e-6, "distributed.bucket_mib": 1e-6}
"""Every parameter by itself."""


class SlowedTask(LaneTask):
    seconds_an_image = 0.0
    seconds_a_step = 0.0

    def prepare(self, sample: LaneSample, key: SampleKey, train: bool) -> LaneExample:
        if train:
            time.sleep(self.seconds_an_image)
        return super().prepare(sample, key, train)

    def loss(self, model: Any, batch: LaneBatch) -> Losses:
        time.sleep(self.seconds_a_step)
        return super().loss(model, batch)


def run_nights(folder: Path, cache: Path, ranks: int) -> dict[str, list[JobRecord]]:
    """Real trainings on so many ranks: quiet nights by number; on several ranks a slowed night by its cause."""
    folder.mkdir(parents=True)
    engine = "torch" if ranks > 1 else "solo"
    launched = launch_script(
        Path(__file__),
        [str(folder), engine],
        ranks,
        engine,
        "gloo",
        folder,
        timeout_seconds=1200,
        environment={"XDG_CACHE_HOME": str(cache)},
    )
    assert launched.exit_code == 0, launched.output + launched.errors
    nights = json.loads((folder / "nights.json").read_text())
    return {
        name: [
            JobRecord(
                night="",
                job=f"lane-small-{ranks}-{repeat}",
                plan="planted",
                model="lane-small",
                kind="scaling",
                parameters=SETTINGS | (SMALL_BUCKETS if name == "exposed_allreduce" else {}),
                num_ranks=ranks,
                hardware="this machine",
                status="finished",
                images_per_second=run["images_per_second"],
                lost_scaling=run["lost_scaling"],
            )
            for repeat, run in enumerate(runs)
        ]
        for name, runs in nights.items()
    }


def main(folder: Path, engine: str) -> None:
    SETTINGS["distributed.engine"] = engine
    config = override(named_config("lane-small"), assignments(SETTINGS))
    communicator = distributed.connect(config.distributed)
    set_threads(config, communicator)
    nights: dict[str, list[dict[str, Any]]] = {}
    for number in range(QUIET_NIGHTS):
        nights[str(number)] = [train(communicator, folder / f"{number}-{repeat}") for repeat in range(REPEATS)]
    batch = config.train.batch_size_per_rank * communicator.size
    step = statistics.median(batch / run["images_per_second"] for runs in nights.values() for run in runs)
    # One length for all ranks: each has measured its own.
    slow = STEPS_LONGER * communicator.broadcast_object(step)
    if communicator.size > 1:
        nights["data"] = [
            train(communicator, folder / "data", SLOWED_STEPS, seconds_an_image=slow / config.train.batch_size_per_rank)
        ]
        nights["straggler"] = [
            train(
                communicator,
                folder / "straggler",
                SLOWED_STEPS,
                seconds_a_step=slow if communicator.rank == communicator.size - 1 else 0.0,
            )
        ]
        nights["exposed_allreduce"] = [
            train(communicator, folder / f"buckets-{repeat}", settings=SMALL_BUCKETS) for repeat in range(REPEATS)
        ]
    if communicator.is_first:
        (folder / "nights.json").write_text(json.dumps(nights))
    communicator.barrier()
    communicator.shutdown()


def train(
    communicator: Communicator,
    folder: Path,
    steps: int = STEPS,
    seconds_an_image: float = 0.0,
    seconds_a_step: float = 0.0,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    config = override(named_config("lane-small"), assignments({**SETTINGS, **(settings or {})}))
    length = steps * communicator.size * config.train.batch_size_per_rank
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, num_samples=length))
    task = SlowedTask(config)
    task.seconds_an_image, task.seconds_a_step = seconds_an_image, seconds_a_step
    run_folder = RunFolder(folder)
    if communicator.is_first:
        run_folder.begin(resume=False)
    communicator.barrier()
    sources = load_sources(config, communicator)
    outcome = Trainer(config, task, sources, communicator, run_folder, SilentTelemetry()).run(StopRequest())
    mean = outcome.rank_means.mean()
    assert outcome.status == "finished" and mean is not None
    lost = {cause: getattr(mean, cause) / mean.step for cause in ("data", "exposed_allreduce", "straggler")}
    if communicator.is_first:
        print(folder.name, outcome.images_per_second, lost, file=sys.stderr, flush=True)
    return {"images_per_second": outcome.images_per_second, "lost_scaling": lost}


def assignments(settings: dict[str, Any]) -> list[str]:
    return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
