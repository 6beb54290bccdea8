"""The slots of this host: one a GPU, or else one a core, and what a job is told so that it keeps to its own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perception.cores import available_cores
from perception.errors import UserError
from perception.run_folder import gpu_names, processor_name


@dataclass(frozen=True)
class Slot:
    """Room for one rank."""

    cores: tuple[int, ...]
    gpu: str = ""
    """As CUDA_VISIBLE_DEVICES names it; empty: none."""
    seats: tuple[str, ...] = ()
    """What it takes of the host, by names that all controllers have in common: its GPU, or a place on each core."""


def host_slots(count: int, environ: Mapping[str, str]) -> tuple[Slot, ...]:
    """`count` slots of this host; 0: one a GPU where there are GPUs, else one a core."""
    gpus = visible_gpus(environ, len(gpu_names()))
    cores = sorted(os.sched_getaffinity(0))
    if count < 0:
        raise UserError(f"local.slots = {count}: must be 0 (all of this host) or more")
    if gpus and count > len(gpus):
        raise UserError(f"local.slots = {count}, but this host has {len(gpus)} GPUs: set at most so many, or 0 for all")
    count = count or len(gpus) or available_cores()
    return divide(count, cores, gpus[:count])


def divide(count: int, cores: Sequence[int], gpus: Sequence[str]) -> tuple[Slot, ...]:
    """Neighbouring cores for each slot, as even as can be; cores are shared where there are more slots.

    >>> [slot.cores for slot in divide(2, [0, 1, 2, 3], [])]
    [(0, 1), (2, 3)]
    """
    slots = []
    taken: Counter[int] = Counter()
    for index in range(count):
        begin, end = index * len(cores) // count, (index + 1) * len(cores) // count
        mine = tuple(cores[begin : max(end, begin + 1)])
        places = tuple(f"core-{core}.{taken[core]}" for core in mine)
        taken.update(mine)
        slots.append(Slot(mine, gpus[index], (f"gpu-{gpus[index]}",)) if gpus else Slot(mine, "", places))
    return tuple(slots)


def visible_gpus(environ: Mapping[str, str], num_gpus: int) -> list[str]:
    """Those that CUDA_VISIBLE_DEVICES leaves, by index or UUID; all that the driver has where it is not set.

    >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "1,3"}, 4)
    ['1', '3']
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(index) for index in range(num_gpus)]
    # As CUDA reads it: what follows an entry of no device does not count.
    found: list[str] = []
    for entry in (word.strip() for word in listed.split(",")):
        if not entry or entry.startswith("-") or (entry.isdigit() and int(entry) >= num_gpus):
            break
        found.append(entry)
    return found if num_gpus else []


def slot_environment(slots: Sequence[Slot], environ: Mapping[str, str]) -> dict[str, str]:
    """What a job on these slots is told: its GPUs, and threads for each rank."""
    told: dict[str, str] = {}
    gpus = [slot.gpu for slot in slots if slot.gpu]
    if gpus:
        told["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if "OMP_NUM_THREADS" not in environ:
        told["OMP_NUM_THREADS"] = str(max(1, len(slot_cores(slots)) // len(slots)))
    return told


def slot_cores(slots: Sequence[Slot]) -> list[int]:
    return sorted({core for slot in slots for core in slot.cores})


def describe_host(slots: Sequence[Slot]) -> str:
    """E.g. "8 x NVIDIA H100 80GB HBM3", or the processor's name and its cores."""
    names = gpu_names()
    num_gpus = sum(1 for slot in slots if slot.gpu)
    if num_gpus and names:
        return f"{num_gpus} x {names[0]}"
    return f"{processor_name()}, {available_cores()} cores"
