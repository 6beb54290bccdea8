"""The file of a recorded step: a round trip, and one line for everything that can be wrong with it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from perception.errors import UserError
from perception.scaling.profile import GradientReady, StepProfile, read_profile, scaled, write_profile

PROFILE = StepProfile(
    model="tiny",
    device="a device",
    precision="fp32",
    batch_size_per_rank=4,
    forward_seconds=0.01,
    backward_seconds=0.02,
    optimizer_seconds=0.002,
    gradients=(GradientReady("b", 10, 4, 0.005), GradientReady("a", 100, 4, 0.02)),
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, PROFILE)
    assert read_profile(path) == PROFILE
    assert PROFILE.gradient_bytes == 440
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.json"]


def _changed(**changes: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(dataclasses.asdict(PROFILE))), **changes}


_GRADIENT = {"name": "a", "numel": 1, "element_bytes": 4, "ready_seconds": 0.01}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON object"),
        (_changed(forward_second=1.0), 'forward_second is no field of it; did you mean "forward_seconds"'),
        ({"model": "tiny"}, "device is missing"),
        (_changed(model=""), "model: a name"),
        (_changed(precision=3), "precision: a name"),
        (_changed(batch_size_per_rank=0), "batch_size_per_rank: a whole number of at least 1"),
        (_changed(batch_size_per_rank=True), "batch_size_per_rank: a whole number"),
        (_changed(forward_seconds=-1), "forward_seconds: a time in seconds"),
        (_changed(backward_seconds="fast"), "backward_seconds: a time"),
        (_changed(optimizer_seconds=float("nan")), "optimizer_seconds: a time"),
        (_changed(optimizer_seconds=10**400), "optimizer_seconds: a time"),
        (_changed(forward_seconds=0, backward_seconds=0, optimizer_seconds=0), "all 0"),
        (_changed(gradients=[]), "gradients: a non-empty list"),
        (_changed(gradients=[3]), r"gradients\[0\]: a JSON object"),
        (_changed(gradients=[{**_GRADIENT, "numel": 1.5}]), r"gradients\[0\].numel: a whole number"),
        (_changed(gradients=[{**_GRADIENT, "element_bytes": 0}]), r"gradients\[0\].element_bytes"),
        (_changed(gradients=[_GRADIENT, _GRADIENT]), "a is there twice"),
        (_changed(gradients=[_GRADIENT, {**_GRADIENT, "name": "b", "ready_seconds": 0.001}]), "earlier than"),
        (_changed(gradients=[{**_GRADIENT, "ready_seconds": 0.03}]), "the last gradient is ready later"),
    ],
)
def test_each_mistake_is_one_line_that_names_file_and_field(tmp_path: Path, content: Any, named: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=named) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_or_binary_file_is_a_mistake_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_profile(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not JSON"):
        read_profile(tmp_path / "binary.json")


def test_a_stretched_profile_reaches_the_rate_and_keeps_its_shape() -> None:
    fast = scaled(PROFILE, images_per_second=4000, device="faster")
    assert fast.images_per_second == pytest.approx(4000)
    assert fast.device == "faster"
    ratios = {
        round(new.ready_seconds / old.ready_seconds, 9)
        for new, old in zip(fast.gradients, PROFILE.gradients, strict=True)
    }
    assert ratios == {round(fast.step_seconds / PROFILE.step_seconds, 9)}
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(UserError, match="positive"):
            scaled(PROFILE, bad, "x")
