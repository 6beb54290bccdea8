"""Record the learning curves that test_search_quality.py replays: real small trainings of hundreds of configurations.

    python tests/sweeps/record_surrogates.py sign-faces sign-or-not

Takes two to three minutes of one core a problem and writes tests/sweeps/recorded_curves/PROBLEM.jsonl: a line that
describes the problem, then one for each configuration with its validation accuracy after each 27th of the training and
the processor seconds of the whole. Pictures are drawn by the project's own renderer of signs, turned, blurred, dimmed.
sign-faces: which of 43 signs a grey picture of 16x16 shows, a perceptron with one hidden layer by SGD. sign-or-not:
which of 43 signs, or none of them, a colour picture of 12x12 shows, two hidden layers with dropout by AdamW.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor, nn

from perception.data.generated.sign_faces import LOOK_ALIKES, NUM_VARIANTS, face
from perception.data.signs.classes import GTSDB_CLASSES
from perception.run_folder import write_atomic
from sweeps.planning.space import Parameter, Sample, SearchSpace

FOLDER = Path(__file__).with_name("recorded_curves")
NUM_CONFIGURATIONS = 300
NUM_POINTS = 27
NUM_VALIDATION = 1000


@dataclass(frozen=True)
class Problem:
    space: SearchSpace
    samples_per_point: int
    data: Callable[[], tuple[Tensor, Tensor]]
    """Inputs and labels; the last 1,000 are for validation."""
    model: Callable[[Sample, int], nn.Module]
    optimizer: Callable[[nn.Module, Sample], torch.optim.Optimizer]


def drawn(kinds: Sequence[Sequence[str]], side: int, colour: bool, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pictures of a random face of a random kind, turned, shifted, blurred, dimmed and with noise, and the kinds."""
    rng = np.random.default_rng(seed)
    pictures = np.empty((count, side * side * (3 if colour else 1)), np.float32)
    labels = rng.integers(0, len(kinds), count)
    for index, label in enumerate(labels):
        names = kinds[label]
        name = names[int(rng.integers(len(names)))]
        shape = "disc" if name == "blank-back" else ""
        picture, alpha = face(name, int(rng.integers(NUM_VARIANTS)), shape).levels[1]
        inks = picture if colour else cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)[..., None]
        share = alpha.astype(np.float32)[..., None] / 255
        mixed = inks.astype(np.float32) / 255 * share + rng.uniform(0, 1) * (1 - share)
        size = mixed.shape[0]
        matrix = cv2.getRotationMatrix2D((size / 2, size / 2), rng.uniform(-15, 15), rng.uniform(0.75, 1.05))
        matrix[:, 2] += rng.uniform(-0.1, 0.1, 2) * size
        moved = cv2.warpAffine(mixed, matrix, (size, size), borderMode=cv2.BORDER_REPLICATE)
        moved = cv2.GaussianBlur(moved, (0, 0), rng.uniform(0.3, 2.0) * size / 32)
        small = cv2.resize(moved, (side, side), interpolation=cv2.INTER_AREA)
        noisy = small * rng.uniform(0.4, 1.0) + rng.normal(0, 0.06, small.shape)
        pictures[index] = ((noisy - 0.4) / 0.25).reshape(-1)
    return torch.from_numpy(pictures), torch.from_numpy(labels)


def perceptron(sample: Sample, num_classes: int) -> nn.Module:
    width = int(_number(sample, "width"))
    return nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, num_classes))


def deeper_perceptron(sample: Sample, num_classes: int) -> nn.Module:
    width, dropout = int(_number(sample, "width")), _number(sample, "dropout")
    return nn.Sequential(
        nn.Linear(432, width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, num_classes),
    )


PROBLEMS = {
    "sign-faces": Problem(
        SearchSpace(
            (
                Parameter("batch", "choice", choices=(8, 16, 32, 64)),
                Parameter("lr", "float", 1e-3, 3.0, log=True),
                Parameter("one_minus_momentum", "float", 0.02, 1.0, log=True),
                Parameter("warmup_share", "float", 0.0, 0.1),
                Parameter("weight_decay", "float", 1e-6, 1e-1, log=True),
                Parameter("width", "choice", choices=(16, 32, 64, 128)),
            )
        ),
        1200,
        lambda: drawn([[name] for name in GTSDB_CLASSES], 16, False, 6000, 0),
        perceptron,
        lambda model, sample: torch.optim.SGD(
            model.parameters(),
            lr=_number(sample, "lr"),
            momentum=1 - _number(sample, "one_minus_momentum"),
            weight_decay=_number(sample, "weight_decay"),
        ),
    ),
    "sign-or-not": Problem(
        SearchSpace(
            (
                Parameter("batch", "choice", choices=(16, 32, 64)),
                Parameter("dropout", "float", 0.0, 0.6),
                Parameter("lr", "float", 1e-5, 1e-1, log=True),
                Parameter("one_minus_beta1", "float", 0.02, 0.5, log=True),
                Parameter("warmup_share", "float", 0.0, 0.3),
                Parameter("weight_decay", "float", 1e-4, 1.0, log=True),
                Parameter("width", "choice", choices=(32, 64, 128)),
            )
        ),
        600,
        lambda: drawn([*([name] for name in GTSDB_CLASSES), LOOK_ALIKES], 12, True, 5000, 12),
        deeper_perceptron,
        lambda model, sample: torch.optim.AdamW(
            model.parameters(),
            lr=_number(sample, "lr"),
            betas=(1 - _number(sample, "one_minus_beta1"), 0.999),
            weight_decay=_number(sample, "weight_decay"),
        ),
    ),
}


def train(problem: Problem, sample: Sample, inputs: Tensor, labels: Tensor, seed: int) -> tuple[list[float], float]:
    """Accuracy after each 27th of the samples, and the processor seconds; after a loss that is not finite, 0."""
    torch.manual_seed(seed)
    held_out, held_out_labels = inputs[-NUM_VALIDATION:], labels[-NUM_VALIDATION:]
    num_train = len(inputs) - NUM_VALIDATION
    model = problem.model(sample, int(labels.max()) + 1)
    optimizer = problem.optimizer(model, sample)
    batch, peak = int(_number(sample, "batch")), _number(sample, "lr")
    num_samples = NUM_POINTS * problem.samples_per_point
    warmup = _number(sample, "warmup_share") * num_samples
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_train, generator=generator)
    seen = 0
    curve: list[float] = []
    begin = time.process_time()
    while len(curve) < NUM_POINTS:
        done = max(0.0, seen - warmup) / max(1.0, num_samples - warmup)
        rate = peak * (min(1.0, (seen + 1) / (warmup + 1)) * (1 + math.cos(math.pi * min(1.0, done))) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        chosen = order[torch.arange(seen, seen + batch) % num_train]
        loss = nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen])
        if not math.isfinite(loss.item()):
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += batch
        if seen >= (len(curve) + 1) * problem.samples_per_point:
            model.eval()
            with torch.no_grad():
                hits = model(held_out).argmax(1) == held_out_labels
            model.train()
            curve.append(round(float(hits.float().mean()), 3))
    return curve + [0.0] * (NUM_POINTS - len(curve)), time.process_time() - begin


def record(name: str) -> None:
    problem = PROBLEMS[name]
    inputs, labels = problem.data()
    generator = random.Random(name)
    lines: list[dict[str, Any]] = [
        {
            "problem": name,
            "figure": "validation accuracy on 1,000 pictures",
            "samples_per_point": problem.samples_per_point,
            "num_points": NUM_POINTS,
            "space": problem.space.hash(),
        }
    ]
    for number in range(NUM_CONFIGURATIONS):
        sample = problem.space.draw(generator)
        curve, seconds = train(problem, sample, inputs, labels, seed=number)
        shown = {key: round(value, 6) if isinstance(value, float) else value for key, value in sample.items()}
        lines.append({"parameters": shown, "seconds": round(seconds, 2), "curve": curve})
        if number % 25 == 0:
            print(f"{name}: {number} of {NUM_CONFIGURATIONS}, last {curve[-1]:.3f} in {seconds:.1f} s", flush=True)
    FOLDER.mkdir(exist_ok=True)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    write_atomic(FOLDER / f"{name}.jsonl", text)


def _number(sample: Sample, name: str) -> float:
    value = sample[name]
    assert isinstance(value, (int, float))
    return float(value)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for problem_name in sys.argv[1:] or list(PROBLEMS):
        record(problem_name)
