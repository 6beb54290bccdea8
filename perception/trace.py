"""A picture in time of a few steps on every rank, in the Chrome trace format, which Perfetto opens.

The format: "Trace Event Format" of the Chromium project; complete events ("X") in microseconds,
a process a rank, a thread a row, names and order by metadata events ("M").
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from perception.distributed import Communicator
from perception.distributed.clock_alignment import clock_offset_seconds
from perception.distributed.reduction import Reducer
from perception.errors import UserError
from perception.run_folder import write_atomic
from perception.step_clock import UNTIMED_STEPS, StepClock

ROWS = ("step", "data", "forward", "backward", "buckets", "wait", "optimizer")

_ROWS_OF_SECTIONS = {
    "step": "step",
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "straggler": "wait",
    "exposed_allreduce": "wait",
    "zero": "optimizer",
    "clip": "optimizer",
    "update": "optimizer",
}
_NAMES = {
    "straggler": "wait for the last rank",
    "exposed_allreduce": "wait for the reduction",
    "zero": "zero gradients",
    "clip": "average and clip",
}


@dataclass(frozen=True)
class Span:
    row: str
    """One of ROWS."""
    name: str
    begin_seconds: float
    end_seconds: float


def chrome_trace(ranks: Sequence[Sequence[Span]]) -> dict[str, Any]:
    """The trace of all ranks' spans, whose times are of one clock; it starts at the earliest of them.

    Buckets in flight at once are put into rows of their own, since spans of one row must not cross.
    """
    start = min((span.begin_seconds for spans in ranks for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(ranks):
        events.append(_metadata("process_name", rank, 0, {"name": f"rank {rank}"}))
        events.append(_metadata("process_sort_index", rank, 0, {"sort_index": rank}))
        row_id = 0
        for row in ROWS:
            for number, lane in enumerate(_without_overlap([span for span in spans if span.row == row])):
                label = row if number == 0 else f"{row} {number + 1}"
                events.append(_metadata("thread_name", rank, row_id, {"name": label}))
                events.append(_metadata("thread_sort_index", rank, row_id, {"sort_index": row_id}))
                events += [_event(span, rank, row_id, start) for span in lane]
                row_id += 1
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class StepTrace:
    """Collects this rank's spans of the first steps after the untimed ones; rank 0 writes those of all ranks.

    Every rank calls the same methods after the same steps.
    """

    def __init__(self, num_steps: int, clock: StepClock, reducer: Reducer, communicator: Communicator) -> None:
        """Trace `num_steps` steps; 0 traces nothing and costs nothing."""
        self._clock, self._reducer, self._communicator = clock, reducer, communicator
        self._num_wanted = num_steps
        # Steps begun with the recording on; where the clock is read late, it needs more to get all.
        self._num_recorded = num_steps + clock.lag_steps
        self._num_seen = 0
        self._first_step = 0
        # Settled before the loop, so that no call of its own disturbs the steps it shows.
        self._offset_seconds = clock_offset_seconds(communicator) if num_steps else 0.0

    @property
    def is_due(self) -> bool:
        """True where a trace was asked for and is not written yet."""
        return self._num_wanted > 0

    def after_step(self, step: int) -> bool:
        """Start or end recording; True when all is in, and `write` is to be called."""
        self._num_seen += 1
        if self.is_due and self._num_seen == UNTIMED_STEPS:
            self._first_step = step + 1 - self._clock.lag_steps
            self._clock.spans, self._reducer.spans = [], []
        return self.is_due and self._num_seen == UNTIMED_STEPS + self._num_recorded

    def write(self, path: Path) -> str:
        """Gather what was recorded; the first rank writes it to `path`. Returns a line for people. Collective."""
        wanted, self._num_wanted = self._num_wanted, 0
        if not self._clock.spans:
            return f"no trace: the run ended after {self._num_seen} steps, and the first {UNTIMED_STEPS} are left out"
        spans = self._own_spans()
        self._clock.spans = self._reducer.spans = None
        ranks = self._communicator.allgather_object([astuple(span) for span in spans])
        steps = [span for span in spans if span.row == "step"]
        fewer = "" if len(steps) >= wanted else f" (the run ended before all {wanted})"
        if self._communicator.is_first:
            try:
                write_atomic(path, json.dumps(chrome_trace([[Span(*row) for row in rows] for rows in ranks])))
            except UserError as error:
                # A training run is worth more than its trace.
                return f"no trace: {error}"
        shown = f"{steps[0].name} to {steps[-1].name}, {len(ranks)} {'rank' if len(ranks) == 1 else 'ranks'}"
        return f"wrote {path}: {shown}{fewer}; open it at https://ui.perfetto.dev"

    def _own_spans(self) -> list[Span]:
        """Recorded spans on rank 0's clock."""
        offset, step = self._offset_seconds, self._first_step
        spans = []
        for section, begin, end in self._clock.spans or []:
            name = f"step {step}" if section == "step" else _NAMES.get(section, section)
            step += section == "step"
            spans.append(Span(_ROWS_OF_SECTIONS[section], name, begin + offset, end + offset))
        # Its "wait" is here already, in the two parts that the clock tells apart.
        buckets = [span for span in self._reducer.spans or [] if span[0] != "wait"]
        spans += [Span("buckets", name, begin + offset, end + offset) for name, begin, end in buckets]
        return spans


def _without_overlap(spans: Sequence[Span]) -> list[list[Span]]:
    """As few lanes as can be, in each of which spans follow one another."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.begin_seconds):
        free = next((lane for lane in lanes if lane[-1].end_seconds <= span.begin_seconds), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _event(span: Span, rank: int, row_id: int, start: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.row,
        "pid": rank,
        "tid": row_id,
        "ts": round(1e6 * (span.begin_seconds - start), 3),
        "dur": round(1e6 * (span.end_seconds - span.begin_seconds), 3),
    }


def _metadata(kind: str, rank: int, row_id: int, value: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row_id, "args": value}
