"""What each part of lane-small brings: one at a time left out or changed, over several seeds, each run for as long.

"As long" is processor time, not samples: a cheaper network sees more of them, as it would for who trains it. The time
of a sample is measured first, all rows in turn, and the run's length follows, so the schedule knows its end and other
work on the machine changes nothing.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from perception.augment_config import LaneAugmentConfig
from perception.config import RunConfig
from perception.errors import UserError
from perception.run_folder import write_atomic
from tests.baselines.comparison import configuration, train
from tests.baselines.peers import OURS

SHOWN = ("culane_f1_50", "culane_f1_75", "culane_mf1", "tusimple_accuracy")
CALIBRATION_SAMPLES = (160, 640)
CALIBRATION_ROUNDS = 3


@dataclass(frozen=True)
class Row:
    part: str
    title: str
    assignments: tuple[str, ...] = ()


NO_AUGMENTATION = ("augment.enabled=false",)
FULL_AUGMENTATION = tuple(
    f"augment.{name}={getattr(LaneAugmentConfig(), name)}"
    for name in ("affine_probability", "hue_probability", "blur_probability")
)
ROWS: Mapping[str, Row] = {
    "all": Row("", "lane-small"),
    "fpn": Row("model", "a pyramid over the strides", ("model.use_fpn=true",)),
    "conv-stem": Row("model", "ResNet's stem instead of patches", ("model.stem=conv",)),
    "one-proposal": Row("assignment", "one proposal a lane", ("model.assignment_candidates=1",)),
    "no-augmentation": Row("augmentation", "none", NO_AUGMENTATION),
    "full-augmentation": Row("augmentation", "that of long runs", FULL_AUGMENTATION),
    "no-ema": Row("EMA", "none", ("optim.ema_decay_samples=0",)),
    "low-resolution": Row("resolution", "96×320", ("model.input_height=96", "model.input_width=320")),
    "high-resolution": Row("resolution", "192×608", ("model.input_height=192", "model.input_width=608")),
}


@dataclass(frozen=True)
class Result:
    row: str
    seed: int
    samples: int
    num_parameters: int
    metrics: Mapping[str, float]


def ablate(
    names: Sequence[str], seeds: Sequence[int], processor_seconds: float, out: Path, jobs: int, extra: Sequence[str]
) -> list[Result]:
    """Train every row with every seed under `out`, `jobs` at once; what is there already is not done again."""
    lengths = run_lengths(names, processor_seconds, out, extra)
    wanted = [(name, seed) for seed in seeds for name in names]
    done = {key: found for key in wanted if (found := _recorded(out, *key, samples=lengths[key[0]])) is not None}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, max_tasks_per_child=1) as pool:
        running = {
            pool.submit(_run, name, seed, lengths[name], out, extra): (name, seed)
            for name, seed in wanted
            if (name, seed) not in done
        }
        for future in as_completed(running):
            done[running[future]] = result = future.result()
            figures = ", ".join(f"{name} {result.metrics[name]:.3f}" for name in SHOWN)
            print(f"{len(done)} of {len(wanted)}: {result.row}, seed {result.seed}: {figures}", flush=True)
    return [done[key] for key in wanted]


def run_lengths(names: Sequence[str], processor_seconds: float, out: Path, extra: Sequence[str]) -> dict[str, int]:
    """Samples, whole steps, that each row gets through in the time: measured once for a folder `out`."""
    path = out / "seconds_a_sample.json"
    seconds: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    missing = [name for name in names if name not in seconds]
    if missing:
        seconds |= _seconds_a_sample(missing, out / "calibration", extra)
        write_atomic(path, json.dumps(seconds, indent=2) + "\n")
    batch = configuration(OURS, 1, extra).train.batch_size_per_rank
    return {name: max(1, round(processor_seconds / seconds[name] / batch)) * batch for name in names}


def _seconds_a_sample(names: Sequence[str], folder: Path, extra: Sequence[str]) -> dict[str, float]:
    """Of a core: a longer run less a shorter one, so that neither start nor evaluation counts."""
    rounds: dict[str, list[float]] = {name: [] for name in names}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as pool:
        for number in range(CALIBRATION_ROUNDS + 1):
            for name in names:
                few, many = (
                    pool.submit(
                        _processor_seconds, name, samples, folder / f"{name}-{number}-{samples}", extra
                    ).result()
                    for samples in CALIBRATION_SAMPLES
                )
                if number:  # the first round warms up, and renders the scenes
                    rounds[name].append((many - few) / (CALIBRATION_SAMPLES[1] - CALIBRATION_SAMPLES[0]))
    return {name: statistics.median(values) for name, values in rounds.items()}


def row_configuration(name: str, seed: int, samples: int, extra: Sequence[str]) -> RunConfig:
    own = (f"train.seed={seed}", "train.num_threads_per_rank=1", *ROWS[name].assignments)
    config = configuration(OURS, samples, [*own, *extra])
    return replace(config, train=replace(config.train, evaluate_every_steps=0))


def _processor_seconds(name: str, samples: int, folder: Path, extra: Sequence[str]) -> float:
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted measurement left
    config = row_configuration(name, 0, samples, [*extra, "data.num_validation_scenes=2"])
    started = time.process_time()
    train(OURS, config, folder)
    return time.process_time() - started


def _run(name: str, seed: int, samples: int, out: Path, extra: Sequence[str]) -> Result:
    folder = out / f"{name}-seed{seed}-{samples}"
    shutil.rmtree(folder, ignore_errors=True)  # a run that was interrupted
    figures, _, _ = train(OURS, row_configuration(name, seed, samples, extra), folder)
    result = Result(name, seed, figures.samples, figures.num_parameters, dict(figures.metrics))
    write_atomic(folder / "ablation.json", json.dumps(asdict(result), indent=2) + "\n")
    return result


def _recorded(out: Path, name: str, seed: int, samples: int) -> Result | None:
    path = out / f"{name}-seed{seed}-{samples}" / "ablation.json"
    if not path.is_file():
        return None
    try:
        return Result(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: not a result of this program ({error}); remove it to run it again") from None


def table(results: Sequence[Result]) -> list[str]:
    """Means over seeds with their standard deviations, and what the change gains or loses, seed by seed."""
    lines = [
        "| part | instead | samples | F1@50 | against all, by seed | F1@75 | mF1 | TuSimple accuracy | parameters |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    by_row: dict[str, dict[int, Result]] = {}
    for result in results:
        by_row.setdefault(result.row, {})[result.seed] = result
    reference = by_row.get("all", {})
    for name, by_seed in by_row.items():
        one = next(iter(by_seed.values()))
        shown = [_mean_and_deviation([result.metrics[metric] for result in by_seed.values()]) for metric in SHOWN]
        gaps = [
            f"{result.metrics[SHOWN[0]] - reference[seed].metrics[SHOWN[0]]:+.3f}"
            for seed, result in by_seed.items()
            if name != "all" and seed in reference
        ]
        row = ROWS[name]
        lines.append(
            f"| {row.part} | {row.title} | {one.samples} | {shown[0]} | {' '.join(gaps)} | {shown[1]} | {shown[2]} | "
            f"{shown[3]} | {one.num_parameters / 1e6:.2f} M |"
        )
    return lines


def _mean_and_deviation(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.3f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.3f}"
