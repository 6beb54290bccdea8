"""Draw one step of a trace.json as an SVG: `python tools/draw_step.py RUN/trace.json docs/pictures/step.svg`."""

from __future__ import annotations

import html
import json
import sys
from pathlib import Path
from typing import Any

WIDTH, LEFT, ROW, GAP = 1000, 150, 26, 14
COLOURS = {
    "data": "#c9a227",
    "forward": "#4c78a8",
    "backward": "#72a0c1",
    "bucket": "#e45756",
    "wait for the last rank": "#bab0ac",
    "wait for the reduction": "#f2a49b",
    "average and clip": "#9d7660",
    "update": "#59a14f",
}


def colour(name: str) -> str | None:
    return next((value for key, value in COLOURS.items() if name.startswith(key)), None)


def main(source: str, target: str) -> None:
    events: list[dict[str, Any]] = [
        event for event in json.loads(Path(source).read_text())["traceEvents"] if "dur" in event
    ]
    steps = sorted(
        (event for event in events if event["name"].startswith("step ") and event["pid"] == 0), key=lambda e: e["ts"]
    )
    chosen = steps[-1]
    begin, end = chosen["ts"], chosen["ts"] + chosen["dur"]
    scale = (WIDTH - LEFT - 10) / (end - begin)
    parts: list[str] = []
    y = 20
    for rank in sorted({event["pid"] for event in events}):
        for title, pick in (
            ("compute", lambda n: not n.startswith("bucket")),
            ("buckets", lambda n: n.startswith("bucket")),
        ):
            label = f"rank {rank}: {title}"
            parts.append(f'<text x="0" y="{y + 18}">{label}</text>')
            for event in events:
                name, fill = event["name"], colour(event["name"])
                left = max(event["ts"], begin)
                right = min(event["ts"] + event["dur"], end)
                if event["pid"] != rank or fill is None or not pick(name) or right <= left:
                    continue
                x, width = LEFT + (left - begin) * scale, max(0.7, (right - left) * scale)
                tip = html.escape(f"{name}: {event['dur'] / 1000:.2f} ms")
                place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}"'
                parts.append(f'<rect {place} fill="{fill}"><title>{tip}</title></rect>')
                if width > 8 * len(name):
                    parts.append(f'<text x="{x + 4:.1f}" y="{y + 18}" fill="#fff">{html.escape(name)}</text>')
            y += ROW + 4
        y += GAP
    x = LEFT
    for name, fill in COLOURS.items():
        parts.append(
            f'<rect x="{x}" y="{y}" width="12" height="12" fill="{fill}"/><text x="{x + 16}" y="{y + 11}">{name}</text>'
        )
        x += 28 + int(6.5 * len(name))
    parts.append(f'<text x="{LEFT}" y="{y + 34}">one step, {(end - begin) / 1000:.0f} ms</text>')
    height = y + 44
    style = "<style>text{font:13px sans-serif;fill:#333}text[fill]{fill:#fff}</style>"
    background = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">'
    Path(target).write_text(f"{svg}{style}{background}{''.join(parts)}</svg>\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
