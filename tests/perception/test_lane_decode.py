"""The NumPy decoding outside an exported file gives what the task gives, and needs no torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from perception.lane_decode import LANE_OUTPUTS, decode_lanes, lane_geometry
from perception.models.lane import LaneOutput
from perception.tasks import LaneTask
from tests.exported_models import CONFIG, MODEL
from tests.ranks import ROOT


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("extend", [True, False])
def test_the_task_decodes_each_image_by_its_own_geometry(seed: int, extend: bool) -> None:
    random = np.random.default_rng(seed)
    config = replace(CONFIG, model=replace(MODEL, extend_to_bottom=extend, max_lanes=3 + seed, crop_top_fraction=0.2))
    unlimited = replace(config.model, max_lanes=40)
    task, proposals = LaneTask(config), 40
    line = random.uniform(-30, 190, (2, proposals, 1)) + random.normal(0, 2, (2, proposals, 1)) * np.arange(65)
    outputs = {
        "logits": random.normal(0, 2, (2, proposals)),
        "xs": line,
        "start": random.normal(0, 20, (2, proposals)),
        "length": random.normal(30, 30, (2, proposals)),
    }
    arrays = [outputs[name].astype(np.float32) for name in LANE_OUTPUTS]
    # An untrained network's extents may be any size; halves are rounded in one way.
    arrays[2][0, :3] = [1e30, -1e30, 0.5]
    arrays[3][0, :3] = [-1e30, 1e30, 1.5]
    geometries = [lane_geometry(task.model_config, 590, 1640), lane_geometry(task.model_config, 97, 61)]
    angles = torch.zeros(2, 1, 1)
    logits, xs, start, length = (torch.from_numpy(array) for array in arrays)
    expected = task.decode(LaneOutput(logits, xs, start, length, (angles, angles, angles)), geometries)
    assert sum(len(prediction.lanes) for prediction in expected) > 2
    for index, (prediction, geometry) in enumerate(zip(expected, geometries, strict=True)):
        found = decode_lanes(*(array[index] for array in arrays), geometry, task.model_config)
        assert len(found.lanes) == len(prediction.lanes)
        for mine, theirs in zip(found.lanes, prediction.lanes, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_allclose(found.scores, prediction.scores, atol=1e-6)
        everything = decode_lanes(*(array[index] for array in arrays), geometry, unlimited)
        assert found.scores == everything.scores[: 3 + seed] and everything.num_left_out == 0
        assert prediction.num_left_out == found.num_left_out == len(everything.lanes) - len(found.lanes)


def test_very_sure_and_very_unsure_logits_need_no_warning() -> None:
    xs = np.full((2, 65), 50.0, np.float32)
    extent = np.array([0.0, 0.0], np.float32), np.array([65.0, 65.0], np.float32)
    geometry = lane_geometry(MODEL, 64, 160)
    found = decode_lanes(np.array([1e30, -1e30], np.float32), xs, *extent, geometry, MODEL)
    assert found.scores == (1.0,)
    # A pixel's centre in the input is its centre in an image of the same size.
    np.testing.assert_allclose(found.lanes[0][:, 0], 50.0)


def test_a_diverged_networks_outputs_are_no_lanes_and_no_warnings() -> None:
    nothing = np.full(3, np.nan, np.float32)
    geometry = lane_geometry(MODEL, 64, 160)
    xs = np.full((3, 65), np.nan, np.float32)
    assert decode_lanes(nothing, xs, nothing, nothing, geometry, MODEL).lanes == ()
    sure = np.ones(3, np.float32)
    assert decode_lanes(sure, np.full((3, 65), 50.0, np.float32), nothing, nothing, geometry, MODEL).lanes == ()


def test_running_an_exported_file_imports_no_torch() -> None:
    modules = "onnx_model, lane_decode, predict, predict_inputs, predict_outputs, overlay, video, provenance"
    code = f"import sys\nfrom perception import {modules}\nprint('torch' in sys.modules, 'onnxruntime' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
