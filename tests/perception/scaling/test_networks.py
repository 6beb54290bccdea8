"""Layer tables of reference networks and of the project's own models."""

from __future__ import annotations

import pytest

from perception.scaling.layers import LAUNCH_SECONDS, Layer, profile_at_flops, profile_at_rate, training_flops
from perception.scaling.reference_networks import REFERENCE_NETWORKS

# Parameters as the papers' models are known to have (torchvision's model pages; Inception-V3 there less its auxiliary
# head); multiplications and additions of one forward pass as usually quoted.
KNOWN = {
    "resnet50": (25_557_032, 8.18),
    "resnet101": (44_549_160, 15.6),
    "resnet152": (60_192_808, 23.0),
    "inception-v3": (23_834_568, 11.43),
    "vgg16": (138_357_544, 30.9),
}


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_parameters_and_flops_are_those_of_the_published_networks(name: str) -> None:
    layers = REFERENCE_NETWORKS[name]()
    parameters, gflops = KNOWN[name]
    assert sum(layer.numel for layer in layers) == parameters
    assert sum(layer.forward_flops for layer in layers) / 1e9 == pytest.approx(gflops, rel=0.01)


def test_the_segmentation_network_of_the_summit_runs_costs_about_what_they_report() -> None:
    # 14.41 TFLOP a sample in training (Kurth et al. 2018, by their count of operations).
    assert training_flops(REFERENCE_NETWORKS["deeplab-v3-plus"]()) / 1e12 == pytest.approx(14.41, rel=0.12)


LAYERS = (
    Layer("first", (("weight", 100),), 3e9),
    Layer("", (("scale", 7),), 0.0),
    Layer("last", (("weight", 50),), 1e9),
)


def test_a_profile_at_a_measured_rate_has_that_rate_and_backward_runs_from_the_last_layer() -> None:
    profile = profile_at_rate(
        "m", LAYERS, device="d", precision="amp", batch_size_per_rank=8, images_per_second=100,
        memory_bytes_per_second=1e12,
    )  # fmt: skip
    assert profile.images_per_second == pytest.approx(100)
    assert [gradient.name for gradient in profile.gradients] == ["last.weight", "scale", "first.weight"]
    ready = [gradient.ready_seconds for gradient in profile.gradients]
    assert ready[0] == pytest.approx(profile.backward_seconds / 4)
    assert ready[2] == pytest.approx(profile.backward_seconds)
    assert profile.backward_seconds == pytest.approx(2 * profile.forward_seconds)


def test_at_an_assumed_pace_no_layer_is_faster_than_its_launch() -> None:
    profile = profile_at_flops(
        "m", LAYERS, device="d", precision="amp", batch_size_per_rank=1, flops_per_second=1e12,
        memory_bytes_per_second=1e12,
    )  # fmt: skip
    assert profile.forward_seconds == pytest.approx(3e9 / 1e12 + LAUNCH_SECONDS + 1e9 / 1e12)


@pytest.mark.parametrize("name", ["lane", "lane-small"])
def test_the_table_of_a_model_holds_every_parameter_once(name: str) -> None:
    import torch

    from perception.scaling.layer_shapes import model_layers
    from perception.tasks import task_for
    from pipelines.configs import named_config

    config = named_config(name)
    with torch.device("meta"):
        expected = {key: parameter.numel() for key, parameter in task_for(config).build_model().named_parameters()}
    table = {
        f"{layer.name}.{key}" if layer.name else key: numel
        for layer in model_layers(config)
        for key, numel in layer.parameters
    }
    assert table == expected


def test_flops_of_a_traced_model_by_hand() -> None:
    import torch
    from torch import nn

    from perception.scaling.layer_shapes import traced_layers

    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 5))
    layers = traced_layers(model, torch.zeros(2, 3, 6, 6))
    assert [layer.name for layer in layers] == ["0", "3"]
    assert layers[0].forward_flops == 2 * 3 * 9 * 8 * 36
    assert layers[1].forward_flops == 2 * 8 * 36 * 5


def test_shared_parameters_are_listed_once_and_unreached_ones_last() -> None:
    import torch
    from torch import Tensor, nn

    from perception.scaling.layer_shapes import traced_layers

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(2, 2)
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.second(self.first(x))
            return result

    layers = traced_layers(Tied(), torch.zeros(1, 4))
    assert [(layer.name, [key for key, _ in layer.parameters]) for layer in layers] == [
        ("first", ["weight", "bias"]),
        ("second", ["bias"]),
        ("unused", ["weight", "bias"]),
    ]
