"""Time to accuracy as the report shows it: who holds each record, and how this night did."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from sweeps.ledger.targets import TargetEntry, TargetKey, records
from sweeps.record import JobRecord


@dataclass(frozen=True)
class TargetLine:
    key: TargetKey
    num_runs: int
    num_reached: int
    holder: TargetEntry | None
    holder_before: TargetEntry | None
    """From whom the holder took the record."""
    is_new_record: bool
    """Set this night."""
    best_tonight: TargetEntry | None


def targets_of(
    jobs: Iterable[JobRecord], night: str, models: Collection[str], price_per_rank_hour: float | None
) -> tuple[TargetLine, ...]:
    """Of all nights' jobs, the targets of the night's models."""
    return tuple(
        TargetLine(
            key=record.key,
            num_runs=record.num_runs,
            num_reached=len(record.entries),
            holder=record.holder,
            holder_before=record.holder_before,
            is_new_record=record.holder is not None and record.holder.night == night,
            best_tonight=next((entry for entry in record.entries if entry.night == night), None),
        )
        for record in records(jobs, price_per_rank_hour)
        if record.key.model in models
    )
