"""What `bench allreduce` compares, and the settings that it tries for each before it measures."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from perception.errors import UserError, nearest

ONE_PROCESS, LIMIT = "one process", "limit"


@dataclass(frozen=True)
class Candidate:
    """One way to set a variant up."""

    label: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of its step in perception.distributed.baselines."""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Variant:
    name: str
    method: str
    """Of perception.distributed_benchmark.Job."""
    engine: str
    """How its processes are started: horovod or torch."""
    transport: str
    local_reduction: str = "engine"
    candidates: tuple[Candidate, ...] = (Candidate(),)
    """The fastest in a first round is measured."""
    channels_last: bool = True
    note: str = ""


# In place or anew: which is faster depends on the allocator, and the limit must not be held back by it.
_PLAIN = tuple(
    Candidate(f"gradients {label}", {"set_to_none": set_to_none})
    for label, set_to_none in (("set to None", True), ("zeroed in place", False))
)
_DDP = tuple(
    Candidate(f"buckets of {mib} MiB, gradients {label}", {"bucket_cap_mb": mib, "set_to_none": set_to_none})
    for mib, label, set_to_none in (
        (1, "set to None", True),
        (4, "set to None", True),
        (25, "set to None", True),
        (25, "zeroed in place", False),
        (100, "set to None", True),
    )
)
_HOROVOD = tuple(
    Candidate(
        f"fusion {mib} MiB, cycle {cycle:g} ms" + (f", {groups} groups" if groups else ""),
        {"num_groups": groups},
        {"HOROVOD_FUSION_THRESHOLD": str(mib << 20), "HOROVOD_CYCLE_TIME": f"{cycle:g}"},
    )
    for mib, cycle, groups in ((128, 1, 0), (16, 1, 0), (128, 5, 0), (16, 2.5, 0), (128, 1, 4))
)
_NOT_CHANNELS_LAST = "weights and gradients contiguous: its optimizer refuses channels_last ones"


def all_variants(ranks: int) -> tuple[Variant, ...]:
    """Every variant, in the order of the table; on one rank ours needs no engine."""
    ours = (
        [Variant("ours/solo", "ours", "torch", "gloo")]
        if ranks == 1
        else [
            Variant(f"ours/{engine}-{transport}/{local}", "ours", engine, transport, local)
            for engine, transport in (("horovod", "mpi"), ("horovod", "gloo"), ("torch", "gloo"))
            for local in ("shared_memory", "engine")
        ]
    )
    return (
        # Started like ranks, but they never join: their engine is a mere starter.
        Variant(ONE_PROCESS, "plain", "torch", "gloo"),
        Variant(LIMIT, "plain", "torch", "gloo", candidates=_PLAIN, note=f"{ranks} processes that share nothing"),
        *ours,
        Variant("ddp/gloo", "ddp", "torch", "gloo", candidates=_DDP),
        *(
            Variant(
                f"horovod-optimizer/{transport}",
                "horovod_optimizer",
                "horovod",
                transport,
                candidates=_HOROVOD,
                channels_last=False,
                note=_NOT_CHANNELS_LAST,
            )
            for transport in ("mpi", "gloo")
        ),
    )


def chosen_variants(ranks: int, names: Sequence[str]) -> tuple[list[Variant], list[str]]:
    """Those asked for by name or by the part before a slash (all without names) that can run here; why others cannot.

    The limit and the single process are always among them. Raises UserError for an unknown name.
    """
    variants = all_variants(ranks)
    # In a sweep over ranks a name may be of other numbers of them.
    every = (*all_variants(1), *all_variants(2))
    for name in names:
        if not any(_is_called(variant, name) for variant in every):
            known = [variant.name for variant in every] + ["ours", "horovod-optimizer", "ddp"]
            raise UserError(f'--variants: "{name}" is unknown{nearest(name, known)}')
    chosen, left_out = [], []
    for variant in variants:
        wanted = not names or variant.method == "plain" or any(_is_called(variant, name) for name in names)
        obstacle = _obstacle(variant)
        if wanted and obstacle is None:
            chosen.append(variant)
        elif wanted:
            left_out.append(f"{variant.name}: left out, {obstacle}")
    return chosen, left_out


def _is_called(variant: Variant, name: str) -> bool:
    return variant.name == name or variant.name.startswith(f"{name}/")


def _obstacle(variant: Variant) -> str | None:
    if variant.engine != "horovod":
        return None
    if importlib.util.find_spec("horovod") is None:
        return "Horovod is not installed"
    from perception.distributed.choice import horovod_has

    return None if horovod_has(variant.transport) else f"Horovod was built without {variant.transport}"
