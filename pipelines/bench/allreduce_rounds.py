"""The measuring part of `bench allreduce`: groups of processes, settings tried, weights compared, rounds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from perception.distributed_benchmark import Job, write_job
from perception.errors import UserError
from pipelines.bench.allreduce_variants import LIMIT, ONE_PROCESS, Candidate, Variant, chosen_variants
from pipelines.bench.rank_group import RankGroup, socket_path

if TYPE_CHECKING:
    from pipelines.bench.allreduce import Plan

CHECK_STEPS = 3
CALIBRATION_ROUNDS = 3
WARM_UP_SECONDS = 0.5
MEMORY_SHARE = 0.7
"""Of the memory that is available, what kept processes may take."""
Arm = tuple[Variant, Candidate]
REFERENCE = Variant("reference", "reference", "torch", "gloo")


@dataclass(frozen=True)
class Turn:
    """One variant's measured steps in one round."""

    step_seconds: float
    """From the common beginning to the last rank's end. For processes that share nothing the harmonic mean of
    their own times, which is less: the limit is not held back by its slowest process."""
    wait_seconds: float
    """Mean over ranks, of a step."""
    cpu_seconds: float
    """Mean over ranks, of a step, all threads."""


@dataclass
class Measured:
    variants: list[Variant]
    candidates: dict[str, Candidate]
    calibration: dict[str, dict[str, float]]
    """Step seconds by variant and label of the candidate."""
    steps: int
    warm_up_steps: int
    """Before each turn, after which caches are as in a long run."""
    num_parameters: int
    precision: str
    kept: bool
    left_out: list[str]
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    """Largest relative difference from the reference, by variant; see `_difference`."""
    ranks_differ: list[str] = field(default_factory=list)
    """Variants whose ranks end with different weights."""
    waiting_cpu_seconds: float = 0.0
    """Processor time that waiting processes took while others were measured."""
    others_share: float = 0.0
    """Of the machine's processor time during the rounds, what went to strangers."""


def measure(plan: Plan, folder: Path) -> Measured:
    """Try settings, check weights, then measure `plan.rounds` rounds; progress is printed.

    Raises UserError if a process fails.
    """
    variants, left_out = chosen_variants(plan.ranks, plan.variants)
    for line in left_out:
        print(line, flush=True)
    measured = _sized(plan, variants, left_out, folder)
    for variant in variants:
        _choose_settings(plan, measured, variant, folder)
    # The same program as the limit, alone.
    measured.candidates[ONE_PROCESS] = measured.candidates[LIMIT]
    _check_weights(plan, measured, folder)
    arms = [(variant, measured.candidates[variant.name]) for variant in variants]
    turns = _interleaved(plan, measured, arms, plan.rounds, folder, is_final=True)
    measured.turns = {variant.name: own for variant, own in zip(variants, turns, strict=True)}
    return measured


def profile(plan: Plan, name: str, folder: Path) -> str:
    """The operators that take most of rank 0's time in steps of one variant, as a table."""
    variants, left_out = chosen_variants(plan.ranks, [name])
    variant = next((variant for variant in variants if variant.name == name), None)
    if variant is None:
        raise UserError(left_out[0] if left_out else f'--profile-variant "{name}": give one variant by its full name')
    with _started(plan, variant, variant.candidates[0], folder) as group:
        group.ask({"do": "prepare"})
        group.ask({"do": "profile", "steps": plan.steps or 5, "path": str(folder / "profile.txt")})
    return (folder / "profile.txt").read_text()


def _sized(plan: Plan, variants: list[Variant], left_out: list[str], folder: Path) -> Measured:
    """Run the limit for a moment: how many steps a turn has follows, and whether processes can be kept."""
    limit = next(variant for variant in variants if variant.name == LIMIT)
    with _started(plan, limit, limit.candidates[0], folder) as group:
        prepared = group.ask({"do": "prepare"})
    step_seconds = statistics.mean(answer["step_seconds"] for answer in prepared)
    steps = plan.steps or max(3, round(plan.seconds / step_seconds))
    warm_up_steps = max(1, min(20, round(WARM_UP_SECONDS / step_seconds)))
    num_processes = sum(num_processes_of(plan, variant) for variant in variants)
    needed = num_processes * max(answer["private_bytes"] for answer in prepared) * 1.3
    available = psutil.virtual_memory().available
    kept = plan.processes == "kept" or (plan.processes == "auto" and needed < MEMORY_SHARE * available)
    num_parameters, precision = prepared[0]["num_parameters"], prepared[0]["precision"]
    print(
        f"{plan.model}, {num_parameters / 1e6:.2f} million parameters, {precision}, {plan.batch_size} images a rank, "
        f"{plan.ranks} ranks of {plan.threads} threads; {plan.rounds} rounds of {len(variants)} variants, "
        f"{steps} steps each; processes {'are kept, stopped between turns' if kept else 'start anew for each turn'}",
        flush=True,
    )
    return Measured(variants, {}, {}, steps, warm_up_steps, num_parameters, precision, kept, left_out)


def _choose_settings(plan: Plan, measured: Measured, variant: Variant, folder: Path) -> None:
    """Take the candidate with the fastest turn; their turns are interleaved too, so that none has bad luck alone."""
    measured.candidates[variant.name] = variant.candidates[0]
    if len(variant.candidates) == 1:
        return
    arms = [(variant, candidate) for candidate in variant.candidates]
    turns = _interleaved(plan, measured, arms, CALIBRATION_ROUNDS, folder)
    seconds = [min(turn.step_seconds for turn in own) for own in turns]
    best = variant.candidates[seconds.index(min(seconds))]
    measured.candidates[variant.name] = best
    labels = [candidate.label for candidate in variant.candidates]
    measured.calibration[variant.name] = dict(zip(labels, seconds, strict=True))
    shown = "; ".join(f"{label} {value * 1e3:.1f} ms" for label, value in zip(labels, seconds, strict=True))
    print(f"settings of {variant.name}: {shown}; taken: {best.label}", flush=True)


def _check_weights(plan: Plan, measured: Measured, folder: Path) -> None:
    """Train every variant from the seed in fp32 and compare its weights with one process that does it all."""
    reference = folder / "reference"
    reference.mkdir(exist_ok=True)
    with _started(plan, REFERENCE, Candidate(), folder) as group:
        group.ask({"do": "check", "steps": CHECK_STEPS, "folder": str(reference)})
    for variant in measured.variants:
        if variant.name in (ONE_PROCESS, LIMIT):
            continue
        own = folder / "weights"
        own.mkdir(exist_ok=True)
        with _started(plan, variant, measured.candidates[variant.name], folder) as group:
            answers = group.ask({"do": "check", "steps": CHECK_STEPS, "folder": str(own)})
        if len({answer["digest"] for answer in answers}) > 1:
            measured.ranks_differ.append(variant.name)
        measured.weights[variant.name] = _difference(own, reference)
        shown = measured.weights[variant.name]
        print(
            f"weights of {variant.name} after {CHECK_STEPS} fp32 steps: "
            + ("bit-equal to the reference" if shown == 0 else f"relative difference {shown:.1e}")
            + ("" if variant.name not in measured.ranks_differ else "; RANKS DIFFER"),
            flush=True,
        )


def _difference(own: Path, reference: Path) -> float:
    """Largest over parameters of |w - w_reference| / |w_reference - w_initial|, L2 norms.

    Relative to the way that the weights went, not to the weights: a missing reduction shows in full. A parameter
    that hardly moved counts as if it had moved a thousandth of the farthest.
    """
    import numpy as np

    names = json.loads((reference / "names.json").read_text())
    if names != json.loads((own / "names.json").read_text()):
        return float("inf")
    weights, expected, initial = (
        np.load(path, mmap_mode="r")
        for path in (own / "weights.npy", reference / "weights.npy", reference / "initial.npy")
    )
    ends = np.cumsum([count for _, count in names])[:-1]
    apart = [
        float(np.linalg.norm(a - b)) for a, b in zip(*(np.split(x, ends) for x in (weights, expected)), strict=True)
    ]
    moved = [
        float(np.linalg.norm(a - b)) for a, b in zip(*(np.split(x, ends) for x in (expected, initial)), strict=True)
    ]
    floor = 1e-3 * max(moved)
    if not all(np.isfinite([*apart, *moved])) or floor == 0:
        return float("inf")
    return max(a / max(m, floor) for a, m in zip(apart, moved, strict=True))


def _interleaved(
    plan: Plan, measured: Measured, arms: Sequence[Arm], rounds: int, folder: Path, is_final: bool = False
) -> list[list[Turn]]:
    """Take `rounds` turns of each arm, one of each in a round; the final ones are shown, and strangers counted."""
    turns: list[list[Turn]] = [[] for _ in arms]
    with contextlib.ExitStack() as stack:
        groups: list[RankGroup] = []
        for number, (variant, candidate) in enumerate(arms if measured.kept else ()):
            groups.append(stack.enter_context(_started(plan, variant, candidate, folder, number)))
            groups[-1].ask({"do": "prepare"})
            groups[-1].pause()
        busy, own, began = _busy_seconds(), 0.0, time.perf_counter()
        for number in range(rounds):
            # Another one begins each time, so that none always follows the same neighbour's end.
            for index in [(number + place) % len(arms) for place in range(len(arms))]:
                variant, candidate = arms[index]
                if measured.kept:
                    before = [group.cpu_seconds() for group in groups]
                    groups[index].resume()
                    turn = take_turn(variant, groups[index], measured.steps, measured.warm_up_steps)
                    groups[index].pause()
                    taken = [group.cpu_seconds() - earlier for group, earlier in zip(groups, before, strict=True)]
                    own += taken[index]
                    measured.waiting_cpu_seconds += sum(taken) - taken[index]
                else:
                    with _started(plan, variant, candidate, folder) as group:
                        group.ask({"do": "prepare"})
                        turn = take_turn(variant, group, measured.steps, measured.warm_up_steps)
                        own += group.cpu_seconds()
                turns[index].append(turn)
            if is_final:
                shown = [f"{arms[i][0].name} {row[-1].step_seconds * 1e3:.1f}" for i, row in enumerate(turns)]
                print(f"round {number + 1}, ms a step: {', '.join(shown)}", flush=True)
        if is_final:
            elapsed = time.perf_counter() - began
            strangers = _busy_seconds() - busy - own
            measured.others_share = max(0.0, strangers / (elapsed * (os.cpu_count() or 1)))
    return turns


def take_turn(variant: Variant, group: RankGroup, steps: int, warm_up_steps: int) -> Turn:
    """Let all ranks warm up, begin together and report."""
    group.ask({"do": "turn", "warm_up_steps": warm_up_steps, "steps": steps})
    answers = group.ask({"do": "go"})
    own = [(answer["ended"] - answer["began"]) / steps for answer in answers]
    if variant.method == "plain":
        step_seconds = statistics.harmonic_mean(own)
    else:
        step_seconds = (max(a["ended"] for a in answers) - min(a["began"] for a in answers)) / steps
    return Turn(
        step_seconds,
        statistics.mean(answer["wait_seconds"] for answer in answers) / steps,
        statistics.mean(answer["cpu_seconds"] for answer in answers) / steps,
    )


@contextlib.contextmanager
def _started(plan: Plan, variant: Variant, candidate: Candidate, folder: Path, number: int = 0) -> Iterator[RankGroup]:
    """A variant's processes; `number` tells apart those that are alive at once."""
    group = start_group(plan, variant, candidate, folder / str(number))
    try:
        yield group
        group.end()
    finally:
        group.kill()


def start_group(plan: Plan, variant: Variant, candidate: Candidate, folder: Path) -> RankGroup:
    """Start the variant's processes, which then await {"do": "prepare"}. Raises UserError if one fails."""
    from pipelines.bench.allreduce import detector_json

    place = folder / variant.name.replace("/", "-").replace(" ", "-")
    place.mkdir(exist_ok=True, parents=True)
    distributed = dataclasses.replace(
        plan.config.distributed,
        engine="solo" if variant.method == "ours" and plan.ranks == 1 else variant.engine,
        transport=variant.transport,
        local_reduction=variant.local_reduction,
    )
    job = Job(
        method=variant.method,
        model=plan.model,
        config=detector_json(plan),
        distributed=dataclasses.asdict(distributed),
        settings=candidate.settings,
        image_size=plan.image_size,
        batch_size=plan.batch_size,
        threads=plan.threads,
        precision=plan.precision,
        channels_last=variant.channels_last,
        seed=plan.seed,
        socket=str(socket_path(place)),
        num_reference_ranks=plan.ranks,
    )
    write_job(place / "job.json", job)
    argv = [sys.executable, "-m", "perception.distributed_benchmark", str(place / "job.json")]
    environment = {**os.environ, **candidate.environment, "OMP_NUM_THREADS": str(plan.threads)}
    ranks = num_processes_of(plan, variant)
    return RankGroup(variant.name, argv, ranks, variant.engine, variant.transport, environment, place)


def num_processes_of(plan: Plan, variant: Variant) -> int:
    return 1 if variant.name in (ONE_PROCESS, REFERENCE.name) else plan.ranks


def _busy_seconds() -> float:
    """Processor time that the whole machine has spent on anything."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)
