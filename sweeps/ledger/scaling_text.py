"""The scaling curve in plain characters, for a terminal or a mail: measured, ideal and the seven-of-eight line."""

from __future__ import annotations

from collections.abc import Sequence

from sweeps.ledger.ledger import ScalingRow

WIDTH, HEIGHT = 64, 14
_LABEL = 6
MEASURED, IDEAL, SEVEN_OF_EIGHT = "o", ".", "-"


def curve(rows: Sequence[ScalingRow]) -> list[str]:
    """Scaling factor against ranks, both from 0; `rows` of one series and night. Empty where only one rank is known."""
    factors = {row.num_ranks: 1.0 if row.num_ranks == 1 else row.scaling_factor for row in rows}
    points = {ranks: factor for ranks, factor in sorted(factors.items()) if factor is not None}
    if len(points) < 2:
        return []
    most = max(points)
    grid = [[" "] * (WIDTH + 1) for _ in range(HEIGHT + 1)]

    def mark(ranks: float, factor: float, sign: str) -> None:
        # What is above the ideal at its end stands at the edge.
        grid[min(HEIGHT, round(HEIGHT * factor / most))][round(WIDTH * ranks / most)] = sign

    for column in range(WIDTH + 1):
        mark(most * column / WIDTH, 7 / 8 * most * column / WIDTH, SEVEN_OF_EIGHT)
        mark(most * column / WIDTH, most * column / WIDTH, IDEAL)
    for ranks, factor in points.items():
        mark(ranks, factor, MEASURED)
    lines = [f"  scaling factor: {MEASURED} measured, {IDEAL} ideal, {SEVEN_OF_EIGHT} seven of eight"]
    for height in range(HEIGHT, -1, -1):
        label = f"{most * height / HEIGHT:.3g}" if height % (HEIGHT // 2) == 0 else ""
        lines.append(f"{label:>{_LABEL}} |{''.join(grid[height])}".rstrip())
    axis = [" "] * (_LABEL + 2 + WIDTH + len(str(most)))
    free = 0
    for ranks in sorted(points, reverse=True):
        # From the right, so that the largest has its number; those that would touch it have none.
        text, place = str(ranks), _LABEL + 2 + round(WIDTH * ranks / most)
        if not free or place + len(text) < free:
            axis[place : place + len(text)] = text
            free = place
    return [*lines, f"{' ' * _LABEL} +{'-' * (WIDTH + 1)}", "".join(axis).rstrip() + " ranks"]
