"""Population-based training (Jaderberg et al. 2017) as pure functions: who takes over whose weights, and what changes.

A member trains a generation as one job, in a run folder of its own, that begins with the averaged weights of an earlier
run folder (`train.initial_checkpoint`). The optimizer's state and the schedule begin anew with each generation.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sweeps.planning.plan import Direction, Population
from sweeps.planning.space import Parameter, Sample, SearchSpace

FACTORS = (0.8, 1.25)
RESAMPLED_SHARE = 0.25
"""Of the parameters of a member that takes over, what is drawn anew instead of moved."""


@dataclass(frozen=True)
class Finished:
    """What a member reached in a generation."""

    member: int
    """From 0; it stays the same over generations."""
    generation: int
    """From 0."""
    parameters: Sample
    value: float | None
    """None: it failed or diverged."""
    run_folder: str
    """With its checkpoint."""


@dataclass(frozen=True)
class Next:
    """What a member does in its next generation."""

    member: int
    generation: int
    parameters: Sample
    initial_checkpoint: str
    """A run folder; empty: it begins untrained."""
    parent: int
    """The member whose weights these are; itself where it goes on."""
    cause: str


def num_generations(population: Population, num_samples: int) -> int:
    """Of `samples_per_generation` each; a rest shorter than that is left out."""
    return num_samples // population.samples_per_generation


def first_generation(population: Population, space: SearchSpace, seed: int, known: Sequence[Sample] = ()) -> list[Next]:
    """Members untrained: first those of `known` configurations, e.g. default and champion, the others at random."""
    generator = random.Random(f"{seed}/population")
    drawn = [space.draw(generator) for _ in range(population.size)]
    chosen = [*known[: population.size], *drawn[len(known) :]]
    return [
        Next(member, 0, dict(sample), "", member, "known" if member < len(known) else "drawn at random")
        for member, sample in enumerate(chosen)
    ]


def next_generation(
    population: Population,
    space: SearchSpace,
    direction: Direction,
    seed: int,
    member: Finished,
    everyone: Iterable[Finished],
) -> Next:
    """What `member` does next; nobody is waited for.

    It is compared with those that finished the same generation (`everyone` may hold all that ever finished): if it is
    among the worst `replaced_share` of them it takes over from one of as many best, with parameters moved away from
    that one's. With fewer than four finished, only a member without a value takes over. The outcome depends on the
    seed, the member, its generation and who has finished, on nothing else.
    """
    peers = {one.member: one for one in everyone if one.generation == member.generation}
    peers[member.member] = member
    ranked = sorted(peers.values(), key=lambda one: (_loss(one, direction), one.member))
    num_replaced = int(len(ranked) * population.replaced_share)
    place = next(place for place, one in enumerate(ranked) if one.member == member.member)
    worst = place >= len(ranked) - num_replaced
    if member.value is None:
        num_replaced, worst = max(1, num_replaced), True
    models = [one for one in ranked[:num_replaced] if one.value is not None and one.member != member.member]
    # Equal to those that it would take over from: nothing is gained.
    if not worst or not models or _loss(models[0], direction) == _loss(member, direction):
        if member.value is None:
            generator = _generator(seed, member)
            return Next(member.member, member.generation + 1, space.draw(generator), "", member.member, "begins anew")
        cause = f"goes on, place {place + 1} of {len(ranked)}"
        return Next(
            member.member, member.generation + 1, dict(member.parameters), member.run_folder, member.member, cause
        )
    generator = _generator(seed, member)
    model = generator.choice(models)
    return Next(
        member=member.member,
        generation=member.generation + 1,
        parameters=perturbed(space, model.parameters, generator),
        initial_checkpoint=model.run_folder,
        parent=model.member,
        cause=f"place {place + 1} of {len(ranked)}: takes over from member {model.member}",
    )


def perturbed(space: SearchSpace, sample: Sample, generator: random.Random) -> Sample:
    """Every parameter moved a little or, one in four, drawn anew; always a sample of the space."""
    return {parameter.name: _moved(parameter, sample, generator) for parameter in space.parameters}


def _moved(
    parameter: Parameter, sample: Sample, generator: random.Random
) -> bool | int | float | str | tuple[object, ...]:
    if generator.random() < RESAMPLED_SHARE:
        return parameter.at(generator.random())
    value = sample[parameter.name]
    up = generator.random() < 0.5
    if parameter.kind == "choice":
        index = parameter.choices.index(value) + (1 if up else -1)
        return parameter.choices[min(len(parameter.choices) - 1, max(0, index))]
    assert isinstance(value, (int, float))
    moved = value * FACTORS[up]
    least = parameter.step or (1.0 if parameter.kind == "int" else 0.0)
    if abs(moved - value) < least:
        moved = value + (least if up else -least)
    if parameter.low <= 0 <= parameter.high and not parameter.step and parameter.kind == "float":
        # Where 0 is in the range, factors never leave it: move by a share of the range.
        moved = value + (1 if up else -1) * 0.1 * (parameter.high - parameter.low)
    found = parameter.nearest_to(moved)
    assert found is not None
    return found


def _generator(seed: int, member: Finished) -> random.Random:
    return random.Random(f"{seed}/population/{member.member}/{member.generation}")


def _loss(one: Finished, direction: Direction) -> float:
    if one.value is None or not math.isfinite(one.value):
        return math.inf
    return -one.value if direction == "maximize" else one.value
