"""`bench allreduce`: what a training step costs with our all-reduce layer, with others', and with none at all.

Rounds of all variants are interleaved, so that a disturbance of the machine meets all alike, and every
figure is compared with the same round's limit: as many processes that share nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from perception.augment_config import SignAugmentConfig
from perception.config import RunConfig, override, to_json
from perception.errors import UserError
from perception.model_config import SignModelConfig
from perception.run_folder import check_folder_of, write_json
from pipelines.bench.scaling import stopped_well
from pipelines.configs import named_config

SIZES = ("resnet-12m", "resnet-50m", "resnet-150m")
DETECTORS = ("lane", "lane-small", "sign")
MODELS = (*DETECTORS, "many-small", *SIZES)
SMALL_IMAGE, FULL_IMAGE = (160, 416), (320, 800)
"""(height, width) of images; the small one is a quarter of the other's area, so that a turn takes seconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="lane", choices=MODELS, metavar="|".join(MODELS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="measured steps of each variant in each round")
    length.add_argument("--seconds", type=float, default=3.0, help="or as many steps as take the limit so long")
    parser.add_argument("--batch", type=int, default=4, help="images of each rank in a step")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of each rank")
    parser.add_argument("--precision", default="auto", choices=("auto", "bf16", "fp32"))
    parser.add_argument("--full-size", action="store_true", help="images of 320x800 instead of 160x416")
    parser.add_argument("--variants", default="", help="names in the table, or what precedes the slash: ours,ddp")
    parser.add_argument("--processes", default="auto", choices=("auto", "kept", "fresh"), help=_PROCESSES_HELP)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="settings of our layer")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    sweep = parser.add_mutually_exclusive_group()
    sweep.add_argument("--sweep-ranks", metavar="1,2,4,8", help="measure with each of these numbers of ranks")
    sweep.add_argument("--sweep-size", action="store_true", help=f"measure each of {', '.join(SIZES)}")
    sweep.add_argument(
        "--profile-variant", metavar="NAME", help="only show where a step of this variant takes its time"
    )


_PROCESSES_HELP = (
    "kept: started once and stopped (SIGSTOP) while others are measured; fresh: started for each turn; "
    "auto: kept where memory allows"
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One measurement: a model on a number of ranks."""

    model: str
    ranks: int
    rounds: int
    steps: int | None
    seconds: float
    batch_size: int
    threads: int
    precision: str
    image_size: tuple[int, int]
    variants: tuple[str, ...]
    processes: str
    seed: int
    config: RunConfig
    """Its `distributed` is our layer's; for the lane models the whole is the detector's."""


def run(options: argparse.Namespace) -> int:
    plans = _plans(options)
    check_folder_of("--json", options.json)
    from pipelines.bench import allreduce_report, allreduce_rounds

    with tempfile.TemporaryDirectory(prefix="allreduce-") as folder, stopped_well():
        if options.profile_variant:
            print(allreduce_rounds.profile(plans[0], options.profile_variant, Path(folder)))
            return 0
        results: list[dict[str, Any]] = []
        for plan in plans:
            results.append(allreduce_report.evaluate(plan, allreduce_rounds.measure(plan, Path(folder))))
            print(allreduce_report.table(results[-1]), flush=True)
            if options.json is not None:
                # After each: what was measured outlives an interrupted sweep.
                document = results[0] if len(plans) == 1 else {"runs": results}
                write_json(options.json, {"command": _command(), **document})
    if len(results) > 1:
        print(allreduce_report.sweep_table(results))
    failed = [name for result in results for name in result["weights"]["mismatches"]]
    for name in failed:
        print(f"error: {name} ends with other weights than the reference", file=sys.stderr)
    return 1 if failed else 0


def _plans(options: argparse.Namespace) -> list[Plan]:
    for name in ("ranks", "rounds", "batch", "threads", "seconds", "steps"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name} {value}: must be above 0")
    plan = Plan(
        model=options.model,
        ranks=options.ranks,
        rounds=options.rounds,
        steps=options.steps,
        seconds=options.seconds,
        batch_size=options.batch,
        threads=options.threads,
        precision=options.precision,
        image_size=FULL_IMAGE if options.full_size else SMALL_IMAGE,
        variants=tuple(name.strip() for name in options.variants.split(",") if name.strip()),
        processes=options.processes,
        seed=options.seed,
        config=_config(options.model, options.full_size, options.set),
    )
    if options.sweep_size:
        return [dataclasses.replace(plan, model=model) for model in SIZES]
    if options.sweep_ranks:
        return [dataclasses.replace(plan, ranks=ranks) for ranks in _numbers("--sweep-ranks", options.sweep_ranks)]
    return [plan]


def _config(model: str, full_size: bool, assignments: list[str]) -> RunConfig:
    for assignment in assignments:
        if model not in DETECTORS and not assignment.strip().startswith("distributed."):
            raise UserError(f"--set {assignment}: --model {model} has no settings; only distributed.* can be set")
    height, width = FULL_IMAGE if full_size else SMALL_IMAGE
    if model == "sign":
        model_config = SignModelConfig(input_height=height, input_width=width)
        config = RunConfig("sign", "sign", augment=SignAugmentConfig(), model=model_config)
    else:
        config = named_config(model if model in DETECTORS else "lane")
        if model == "lane":
            shape = dataclasses.replace(config.model, input_height=height, input_width=width)
            config = dataclasses.replace(config, model=shape)
    config = dataclasses.replace(
        config,
        # Nothing is read: augmentation would be loaded in vain.
        augment=dataclasses.replace(config.augment, enabled=False),
        # A paused process must not find its time out when it goes on.
        distributed=dataclasses.replace(config.distributed, timeout_seconds=1800.0),
    )
    return override(config, assignments)


def detector_json(plan: Plan) -> str | None:
    """The configuration that a detector is built by; None for the other models."""
    return to_json(plan.config) if plan.model in DETECTORS else None


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(f"{option} {text}: must be whole numbers above 0 with commas between, e.g. 1,2,4,8")
    return numbers


def _command() -> str:
    return shlex.join(["python", "-m", "pipelines", *sys.argv[1:]])
