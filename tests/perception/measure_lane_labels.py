"""Reading large label sets and scoring many images: seconds, and how much memory the process has grown by at its peak.

    python tests/perception/measure_lane_labels.py make FOLDER [--tusimple 2858] [--culane 100000] [--scored 10000]
    python tests/perception/measure_lane_labels.py tusimple|culane|metric FOLDER

`make` writes label files as data sets have them: FOLDER/tusimple/label_data_0313.json and label_data_0601.json, lanes
of 48 and 56 rows; FOLDER/culane/driver_*/VIDEO.MP4/NNNNN.lines.txt with list/train_gt.txt, at most four lanes of some
30 points an image; FOLDER/predicted/ the same shifted by some pixels for the first `--scored` images, list/scored.txt.
Images of culane/ are empty files, those of tusimple/ are absent.
`tusimple` and `culane` read the labels as training does, `metric` scores the predictions by the CULane metric, each in
a process of its own. One line of JSON each: images, seconds, seconds of processor time, and peak_growth_mib beside
packed_mib, what the labels themselves take.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from perception.data.culane import CulaneDataset  # noqa: E402
from perception.data.lane_store import LaneStore  # noqa: E402
from perception.data.tusimple import TusimpleDataset  # noqa: E402
from pipelines.evaluate import evaluate_lane_files  # noqa: E402

FRAMES_A_VIDEO = 500


def lanes_of(chance: np.random.Generator, rows: NDArray[np.float64], width: int) -> list[NDArray[np.float64]]:
    """Up to four lanes (K, 2) at `rows`, which run from the bottom up: gently bent, some leaving the image."""
    lanes = []
    depth = (rows[0] - rows) / (rows[0] - rows[-1])
    for bottom in np.sort(chance.uniform(-0.4, 1.4, chance.choice(5, p=(0.08, 0.07, 0.15, 0.3, 0.4)))) * width:
        vanishing = width * chance.uniform(0.45, 0.55)
        x = bottom + (vanishing - bottom) * depth + width * chance.normal(0, 0.03) * depth**2
        visible = (x > -20) & (x < width + 20) & (depth <= chance.uniform(0.6, 1.0))
        if visible.sum() >= 2:
            lanes.append(np.stack([x, rows], axis=1)[visible])
    return lanes


def culane_text(lanes: list[NDArray[np.float64]]) -> str:
    return "".join(" ".join(f"{x:.3f} {y:g}" for x, y in lane) + " \n" for lane in lanes)


def make(folder: Path, num_tusimple: int, num_culane: int, num_scored: int) -> None:
    write_tusimple(folder / "tusimple", num_tusimple)
    chance, rows = np.random.default_rng(2), np.arange(590.0, 250.0, -10.0)
    names = []
    for number in range(num_culane):
        video, frame = divmod(number, FRAMES_A_VIDEO)
        name = f"driver_{video % 6 + 1}/{video:05}.MP4/{frame * 30:05}"
        lanes = lanes_of(chance, rows, 1640)
        write(folder / "culane" / f"{name}.lines.txt", culane_text(lanes))
        # Readers look for every image and open none.
        write(folder / "culane" / f"{name}.jpg", "")
        if number < num_scored:
            found = [lane + np.array([chance.normal(0, 6), 0]) for lane in lanes if chance.random() > 0.1]
            write(folder / "predicted" / f"{name}.lines.txt", culane_text(found))
        names.append((name, len(lanes)))
    flags = {count: " ".join(str(int(place < count)) for place in range(4)) for count in range(5)}
    lines = (f"/{name}.jpg /laneseg_label_w16/{name}.png {flags[count]}\n" for name, count in names)
    write(folder / "culane" / "list" / "train_gt.txt", "".join(lines))
    write(folder / "culane" / "list" / "scored.txt", "".join(f"/{name}.jpg\n" for name, _ in names[:num_scored]))


def write_tusimple(folder: Path, count: int) -> None:
    chance, files = np.random.default_rng(1), {"0313": (240, 48), "0601": (160, 56)}
    for name, (first_row, num_rows) in files.items():
        rows = np.arange(first_row, first_row + 10 * num_rows, 10)
        lines = []
        for number in range(count // 2 + (count % 2 if name == "0601" else 0)):
            lanes = []
            for lane in lanes_of(chance, rows[::-1].astype(np.float64), 1280):
                x = {int(row): int(np.clip(place, 0, 1279)) for place, row in lane}
                lanes.append([x.get(int(row), -2) for row in rows])
            record = {"lanes": lanes, "h_samples": rows.tolist(), "raw_file": f"clips/{name}-1/{number}/20.jpg"}
            lines.append(json.dumps(record) + "\n")
        write(folder / f"label_data_{name}.json", "".join(lines))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def read_tusimple(folder: Path) -> dict[str, Any]:
    data = TusimpleDataset(folder / "tusimple", sorted((folder / "tusimple").glob("*.json")), images_required=False)
    return {"images": len(data), "lanes": data.report.lanes, "packed_mib": packed_mib(data.lanes)}


def read_culane(folder: Path) -> dict[str, Any]:
    data = CulaneDataset(folder / "culane", [folder / "culane" / "list" / "train_gt.txt"])
    return {"images": len(data), "lanes": data.report.lanes, "packed_mib": packed_mib(data.lanes)}


def score(folder: Path) -> dict[str, Any]:
    labels = folder / "culane"
    evaluation = evaluate_lane_files(folder / "predicted", labels, "culane", labels / "list" / "scored.txt")
    return {"images": evaluation.num_images, "culane_f1_50": evaluation.metrics["culane_f1_50"]}


def packed_mib(lanes: LaneStore) -> float:
    return (lanes.points.nbytes + lanes.lane_starts.nbytes + lanes.image_starts.nbytes) / 2**20


def measured(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    def peak_mib() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def processor_seconds() -> float:
        return sum(resource.getrusage(who).ru_utime + resource.getrusage(who).ru_stime for who in whose)

    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    before, used, start = peak_mib(), processor_seconds(), time.perf_counter()
    figures = work()
    seconds = time.perf_counter() - start
    figures |= {
        "seconds": seconds,
        "processor_seconds": processor_seconds() - used,
        "peak_growth_mib": peak_mib() - before,
    }
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "tusimple", "culane", "metric"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tusimple", type=int, default=2858)
    parser.add_argument("--culane", type=int, default=100_000)
    parser.add_argument("--scored", type=int, default=10_000)
    arguments = parser.parse_args()
    if arguments.what == "make":
        make(arguments.folder, arguments.tusimple, arguments.culane, arguments.scored)
        return
    work = {"tusimple": read_tusimple, "culane": read_culane, "metric": score}[arguments.what]
    print(json.dumps({"what": arguments.what, **measured(lambda: work(arguments.folder))}))


if __name__ == "__main__":
    main()
