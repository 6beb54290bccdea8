"""SignTask: classes by name, examples and batches, prediction that no batch, order or padding changes."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from perception.augment_config import SignAugmentConfig
from perception.config import RunConfig, TrainConfig
from perception.data.lane_targets import SampleKey
from perception.data.loader import training_batches
from perception.data.sample import ReadReport
from perception.data.signs.batch import SignBatch, WholeImageBatch
from perception.data.signs.cache import CachedImages
from perception.data.signs.classes import GTSDB_CLASSES
from perception.data.signs.sample import SignPrediction, SignSample, SignTruth
from perception.errors import UserError
from perception.models.sign import SignOutput
from perception.models.sign_boxes import encode_boxes, grid_points
from perception.sign_inference import find_signs
from perception.sign_task import SignTask, with_classes
from perception.tasks import task_for
from perception.tiling import tile_starts
from pipelines.configs import CONFIGS, named_config, with_options
from tests.perception.sign_cases import TINY as TINY_MODEL

CLASSES = ("a", "b", "c", "d", "e")
CONFIG = RunConfig(
    task="sign",
    name="tiny",
    augment=SignAugmentConfig(mosaic_probability=0.5),
    model=replace(TINY_MODEL, num_classes=0, input_height=64, input_width=96),
    train=TrainConfig(num_samples=24, batch_size_per_rank=4, seed=3),
)
SIZES = ((120, 200), (96, 160), (130, 90), (64, 64))


class Streets:
    """Noise of several sizes; every other image has no sign."""

    def __init__(self, count: int = 6, classes: tuple[str, ...] = CLASSES) -> None:
        self.classes, self.count = classes, count
        self.report = ReadReport(images=count, signs=count)
        self.decoded: list[int] = []

    def __len__(self) -> int:
        return self.count

    def truth(self, index: int) -> SignTruth:
        height, width = SIZES[index % len(SIZES)]
        boxes = np.array([[10.0, 10, 34, 30], [40.0, 20, 56, 40]])[: 2 * (index % 2)]
        labels = np.array([index % 5, 3])[: len(boxes)]
        return SignTruth(f"street-{index}", height, width, boxes, labels, np.array([[0.0, 0, 8, 8]]))

    def sample(self, index: int) -> SignSample:
        self.decoded.append(index)
        truth = self.truth(index)
        random = np.random.default_rng(index)
        return SignSample(random.integers(0, 256, (truth.height, truth.width, 3), dtype=np.uint8), truth)


def predictions_equal(a: SignPrediction, b: SignPrediction) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("boxes", "scores", "labels"))


def test_classes_are_those_of_the_data() -> None:
    task = task_for(CONFIG, Streets())
    assert isinstance(task, SignTask) and task.classes == CLASSES
    assert task.config.model.num_classes == 5 and task.config.model.class_names == CLASSES  # type: ignore[union-attr]
    recorded = with_classes(CONFIG, CLASSES)
    assert with_classes(recorded, CLASSES) == recorded and task_for(recorded).classes == CLASSES  # type: ignore[attr-defined]
    assert task.objects(ReadReport(signs=7)) == "7 signs of 5 classes"
    assert task_for(CONFIG).classes == GTSDB_CLASSES, "without data those of the generated scenes"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("recorded", "found", "message"),
    [
        (
            CLASSES,
            ("a", "b", "c", "d", "x"),
            r'class "e" of model\.class_names of tiny is not among the classes of gen',
        ),
        (CLASSES, (*CLASSES, "f"), r'class "f" of generated is not among the classes of model\.class_names of tiny'),
        (CLASSES, ("a", "c", "b", "d", "e"), r'class 1 is "b" of model\.class_names of tiny, but "c" of generated'),
        (("q", "r", "s"), CLASSES, r'class "q" and 2 more of model\.class_names'),
    ],
)
def test_other_classes_are_refused_by_name(recorded: tuple[str, ...], found: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        with_classes(with_classes(CONFIG, recorded), found)


def test_another_number_of_classes_is_refused() -> None:
    config = replace(CONFIG, model=replace(CONFIG.model, num_classes=43))
    with pytest.raises(UserError, match=r"model\.num_classes = 43, but generated has 5 classes; 0 takes as many"):
        with_classes(config, CLASSES)


@pytest.mark.parametrize("name", sorted(name for name, make in CONFIGS.items() if make().task == "sign"))
def test_every_configuration_builds_its_model(name: str) -> None:
    for data in ("generated", "/a/folder"):
        config = with_options(named_config(name), data, None, [])
        task = task_for(config)
        assert config.name == name and config.data.source == data
        assert sum(parameter.numel() for parameter in task.build_model().parameters()) > 1e5
        with torch.device("meta"):
            assert task.build_model().classify.out_channels == 43


def test_what_a_folder_asks_for_is_laid_under_the_users_settings() -> None:
    """And over a configuration by name only: one from a file stays as it is."""
    named = named_config("sign")
    assert with_options(named, "generated", None, []) == named
    assert with_options(named, "/a", None, []).augment.repeat_threshold > 0  # type: ignore[union-attr]
    assert with_options(named, "/a", None, ["augment.repeat_threshold=0"]).augment.repeat_threshold == 0  # type: ignore[union-attr]
    changed = with_options(named, None, None, ["train.seed=5"])
    assert with_options(changed, "/a", None, []) == replace(changed, data=replace(changed.data, source="/a"))


def test_examples_are_crops_to_train_on_and_whole_images_to_predict_on() -> None:
    streets = Streets()
    task = task_for(CONFIG, streets)
    batch = task.collate([task.prepare(streets.sample(index), SampleKey(0, index), train=True) for index in range(4)])
    assert isinstance(batch, SignBatch) and batch.images.shape == (4, 64, 96, 3) and len(batch) == 4
    assert [truth.name for truth in batch.truths] == [f"street-{index}" for index in range(4)]
    whole = task.collate([task.prepare(streets.sample(index), SampleKey(0, index), train=False) for index in range(2)])
    assert isinstance(whole, WholeImageBatch)
    assert [tuple(image.shape) for image in whole.images] == [(120, 200, 3), (96, 160, 3)]
    assert whole.to(torch.device("cpu")).names == whole.names and whole.truths[1].boxes.shape == (2, 4)


def test_a_batch_names_every_image_that_it_shows() -> None:
    """As the guard against inf and NaN names them: the cause may be in any part of a mosaic."""
    shown: dict[float, list[str]] = {}
    for probability in (0.0, 1.0):
        streets = Streets(40)
        task = task_for(replace(CONFIG, augment=SignAugmentConfig(mosaic_probability=probability)), streets)
        samples = [streets.sample(index) for index in range(2)]
        streets.decoded.clear()
        batch = task.collate([task.prepare(sample, SampleKey(0, index), True) for index, sample in enumerate(samples)])
        shown[probability] = [f"street-{index}" for index in (0, *streets.decoded[:3], 1, *streets.decoded[3:])]
        assert list(batch.to(torch.device("cpu")).names) == shown[probability] and len(batch) == 2
    assert [len(names) for names in shown.values()] == [2, 8]


def test_losses_of_batches_with_and_without_signs_have_gradients_for_all_weights() -> None:
    """The same graph on every rank, whatever its images hold."""
    streets = Streets()
    task = task_for(CONFIG, streets)
    torch.manual_seed(0)
    model = task.build_model()
    for indices in ([1, 3], [0, 2]):
        batch = task.collate([task.prepare(streets.sample(i), SampleKey(0, i), train=True) for i in indices])
        model.zero_grad()
        task.loss(model, batch).total.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_prediction_depends_on_neither_batch_nor_order() -> None:
    streets = Streets(4)
    task = task_for(CONFIG, streets)
    torch.manual_seed(0)
    model = untrained(task)
    examples = [task.prepare(streets.sample(index), SampleKey(0, index), train=False) for index in range(4)]
    together = task.predict(model, task.collate(examples))
    reverse = task.predict(model, task.collate(examples[::-1]))[::-1]
    alone = [task.predict(model, task.collate([example]))[0] for example in examples]
    assert all(len(prediction.scores) > 0 for prediction in alone)
    for prediction, other, single, (height, width) in zip(together, reverse, alone, SIZES, strict=True):
        assert predictions_equal(prediction, other) and predictions_equal(prediction, single)
        assert (prediction.boxes >= 0).all() and (prediction.boxes <= [width, height] * 2).all()
        assert (np.diff(prediction.scores) <= 0).all()


def untrained(task: SignTask) -> torch.nn.Module:
    """A network that finds something everywhere."""
    model = task.build_model().eval()
    with torch.no_grad():
        model.classify.bias.zero_()
        model.regress.bias[0] = 0.0
    return model


class Finder(torch.nn.Module):
    """Finds a bright rectangle that lies in its picture, at the point nearest its centre, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, ...]] = []

    def forward(self, images: torch.Tensor) -> SignOutput:
        _, height, width, _ = images.shape
        self.asked.append((height, width))
        grid = grid_points(height, width)
        objectness = torch.full((1, len(grid)), -20.0)
        classes = torch.full((1, len(grid), 5), -20.0)
        offsets = torch.zeros(1, len(grid), 4)
        rows, columns = (images[0, :, :, 0] > 200).nonzero(as_tuple=True)
        if len(rows):
            box = torch.tensor([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]).float()
            centre = (box[:2] + box[2:]) / 2
            point = (grid[:, :2] - centre).square().sum(dim=1).argmin()
            objectness[0, point], classes[0, point, 2] = 5.0, 5.0
            offsets[0, point] = encode_boxes(box, grid[point])
        return SignOutput(objectness, classes, offsets)


@pytest.mark.parametrize("left", [0, 70, 100, 118, 150, 230])
def test_tiles_find_what_lies_across_their_sides_once(left: int) -> None:
    image = np.full((150, 260, 3), 60, np.uint8)
    image[64:92, left : left + 30] = 255
    config = replace(TINY_MODEL, tile_size=128, tile_overlap=64)
    finder = Finder()
    found = find_signs(finder, torch.from_numpy(image), config)
    assert len(finder.asked) > 4 and set(finder.asked) == {(128, 128)}
    np.testing.assert_allclose(found.boxes, [[left, 64, left + 30, 92]], atol=1e-3)
    assert found.labels.tolist() == [2]


def test_tiles_cover_every_pixel_and_overlap_enough() -> None:
    for length in range(1, 400, 7):
        starts = tile_starts(length, 96, 40)
        ends = [start + 96 for start in starts]
        assert starts[0] == 0 and (ends[-1] == length or length <= 96)
        assert all(end - start >= 40 for start, end in zip(starts[1:], ends, strict=False))
    assert tile_starts(5000, 0, 160) == [0]


def test_an_image_of_any_size_is_padded_not_resized() -> None:
    finder = Finder()
    image = torch.full((50, 70, 3), 60, dtype=torch.uint8)
    image[20:40, 10:70] = 255
    found = find_signs(finder, image, TINY_MODEL)
    assert finder.asked == [(64, 96)]
    np.testing.assert_allclose(found.boxes, [[10, 20, 70, 40]], atol=1e-3)


def test_decoded_images_are_kept_up_to_the_budget() -> None:
    streets = Streets(4)
    size = streets.sample(0).image.nbytes
    streets.decoded.clear()
    cached = CachedImages(streets, size + 10)
    for _ in range(3):
        np.testing.assert_array_equal(cached.sample(0).image, streets.sample(0).image)
        cached.sample(1)
    assert streets.decoded.count(1) == 3, "there was no room for the second"
    streets.decoded.clear()
    cached.sample(0)
    assert streets.decoded == []
    with pytest.raises(ValueError, match="read-only"):
        cached.sample(0).image[0, 0] = 0
    assert len(pickle.dumps(cached)) < size


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_batches_are_the_same_whoever_loads_them(workers: int) -> None:
    """On one rank or two, in the rank or in worker processes, cached or not, from the start or from the middle."""

    def images(rank: int, size: int, position: int, cached: bool) -> list[torch.Tensor]:
        streets = CachedImages(Streets(), 1 << 20) if cached else Streets()
        config = replace(
            CONFIG,
            data=replace(CONFIG.data, workers_per_rank=workers),
            augment=replace(CONFIG.augment, repeat_threshold=0.9),
            train=replace(CONFIG.train, batch_size_per_rank=4 // size),
        )
        return [
            batch.images for batch in training_batches(streets, task_for(config, streets), rank, size, position, False)
        ]

    one = images(0, 1, 0, cached=False)
    two = [torch.cat(parts) for parts in zip(images(0, 2, 0, True), images(1, 2, 0, False), strict=True)]
    assert len(one) == 6 and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one[3:], images(0, 1, 12, True), strict=True))


def test_labels_are_described_in_full() -> None:
    task, streets = task_for(CONFIG, Streets()), Streets()
    truth = streets.truth(1)
    lines = {
        task.describe(truth),
        task.describe(replace(truth, labels=truth.labels[::-1].copy())),
        task.describe(replace(truth, ignored=truth.ignored + 1)),
        task.describe(replace(truth, boxes=truth.boxes * 1.5)),
    }
    assert len(lines) == 4 and all(line.startswith("street-1 96x160 ") for line in lines)
