"""The scaling factor of each model as the report shows it: the ledger's newest rows, and the factor over nights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sweeps.ledger.ledger import LOST, ScalingRow, latest_rows, left_out, row_before, scaling_table
from sweeps.record import JobRecord

SEVEN_OF_EIGHT = 7 / 8
LOST_NAMES = {
    "data": "waiting for data",
    "exposed_allreduce": "all-reduce in the open",
    "straggler": "waiting for the slowest rank",
    "compute": "compute and the rest",
}


@dataclass(frozen=True)
class ScalingSeries:
    """Of one model on one hardware, image and setting of work."""

    model: str
    hardware: str
    image: str
    configuration: str
    night: str
    """In which the rows were measured."""
    is_tonight: bool
    rows: tuple[ScalingRow, ...]
    """A row a number of ranks."""
    history: tuple[ScalingRow, ...]
    """The most ranks measured, night by night, oldest first."""
    change: float | None
    """Of the scaling factor at the most ranks against the measurement before, as a share."""
    change_since: str

    @property
    def top(self) -> ScalingRow | None:
        """The row of the most ranks that has a scaling factor and more than one rank."""
        return next((r for r in reversed(self.rows) if r.scaling_factor is not None and r.num_ranks > 1), None)


@dataclass(frozen=True)
class ScalingView:
    series: tuple[ScalingSeries, ...]
    models_without: tuple[str, ...]
    """Models of the night that no night of the history has measured."""
    left_out: dict[str, int]
    """Scaling runs of the night that are in no row, by reason."""


def scaling_of(night: str, jobs: Sequence[JobRecord], earlier: Sequence[JobRecord]) -> ScalingView:
    """Of the models that the night trained or measured."""
    models = sorted({job.model for job in jobs})
    rows = [row for row in scaling_table([*earlier, *jobs]) if row.model in models]
    by_series: dict[tuple[str, str, str, str], list[ScalingRow]] = {}
    for row in rows:
        by_series.setdefault(row.series, []).append(row)
    newest = {row.series: row.night for row in latest_rows(rows)}
    measured_tonight = {key[0] for key, night_of in newest.items() if night_of == night}
    found = []
    for key, own in by_series.items():
        # What hardware or image was used before says nothing of this night once the present one is measured.
        if newest[key] != night and key[0] in measured_tonight:
            continue
        found.append(_series(own, newest[key], night))
    return ScalingView(
        series=tuple(found),
        models_without=tuple(model for model in models if not any(series.model == model for series in found)),
        left_out=left_out(jobs),
    )


def lost_parts(row: ScalingRow) -> dict[str, float]:
    """What is missing to the ideal by cause, in people's words; gains count as nothing."""
    return {LOST_NAMES[name]: max(0.0, row.lost[name]) for name in LOST if name in row.lost}


def _series(rows: Sequence[ScalingRow], newest: str, night: str) -> ScalingSeries:
    own = tuple(row for row in rows if row.night == newest)
    top = next((row for row in reversed(own) if row.scaling_factor is not None and row.num_ranks > 1), None)
    history: tuple[ScalingRow, ...] = ()
    change, since = None, ""
    if top is not None:
        size = (top.num_ranks, top.num_nodes)
        history = tuple(r for r in rows if (r.num_ranks, r.num_nodes) == size and r.scaling_factor is not None)
        before = row_before(history, top)
        if before is not None and before.scaling_factor and top.scaling_factor is not None:
            change, since = top.scaling_factor / before.scaling_factor - 1, before.night
    first = rows[0]
    return ScalingSeries(
        model=first.model,
        hardware=first.hardware,
        image=first.image,
        configuration=first.configuration,
        night=newest,
        is_tonight=newest == night,
        rows=own,
        history=history,
        change=change,
        change_since=since,
    )
