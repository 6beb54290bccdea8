"""Published scaling figures, which of them the model is fitted to, and what it predicts for the others.

Four figures fix four numbers; every other figure is predicted with those and nothing else. What is fitted to
is shown as such, beside what the model would say without the number that it gave:

- jitter, shared by all nodes: NVIDIA's DGX-1 in fp32;
- images/s that the input of a DGX-1, and of a DGX A100, can deliver: their mixed-precision figures;
- what a 25 Gb NIC of 2017 carried under Horovod: its VGG-16.

How far to trust it: that jitter is normal and that input is a hard bound was chosen with these figures in view, so the
errors of predicted rows are somewhat too small; the rows of the DGX-1 with 32 GB nearly repeat fitted ones. Sources do
not say why mixed precision scales worse than fp32 on the same eight GPUs. Input is the likely cause: images are decoded
by the host's cores, and two thirds of the loss are absent on V100 nodes whose GPUs are a third slower (DLPerf). It is
an attribution, not a finding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perception.scaling import links
from perception.scaling.layers import Layer, profile_at_rate, training_flops
from perception.scaling.links import NCCL_ALGORITHMS, NODES, Cluster
from perception.scaling.overlap import TimedPlan, candidate_plans
from perception.scaling.predict import Residue, predict
from perception.scaling.profile import StepProfile
from perception.scaling.reference_networks import REFERENCE_NETWORKS

_NVIDIA = "NVIDIA DeepLearningExamples, ResNet-50 v1.5 for PyTorch"
_HOROVOD = "horovod docs/benchmarks.rst"
_DLPERF = "OneFlow DLPerf, NVIDIA PyTorch ResNet-50 v1.5"
_SUMMIT = "Kurth et al. 2018, Exascale Deep Learning for Climate Analytics"


@dataclass(frozen=True)
class PublishedPoint:
    name: str
    source: str
    node: str
    model: str
    precision: str
    batch_size_per_rank: int
    images_per_second: float
    """Of one GPU."""
    ranks: int
    scaling_factor: float
    engine: str = "torch"
    algorithms: tuple[str, ...] = NCCL_ALGORITHMS
    real_input: bool = True
    """False for synthetic images, which no input pipeline delivers."""
    fits: str = ""
    """The number that is fitted to this figure; empty: the figure is predicted."""

    @property
    def efficiency(self) -> float:
        return self.scaling_factor / self.ranks


def _nvidia(name: str, node: str, precision: str, batch: int, one: float, factor: float, fits: str) -> PublishedPoint:
    return PublishedPoint(name, _NVIDIA, node, "resnet50", precision, batch, one, 8, factor, fits=fits)


def _dlperf(precision: str, batch: int, one: float, ranks: int, rate: float) -> PublishedPoint:
    name = f"8 x V100 a node, {precision}, {ranks} GPUs"
    return PublishedPoint(name, _DLPERF, "v100-edr1", "resnet50", precision, batch, one, ranks, rate / one)


def _horovod(model: str, one: float, efficiency: float, fits: str = "") -> PublishedPoint:
    # NCCL of 2017 had rings only; the images were synthetic.
    return PublishedPoint(
        f"512 P100, {model}", _HOROVOD, "p100-roce25", model, "fp32", 64, one, 512, 512 * efficiency, "horovod",
        ("ring",), real_input=False, fits=fits,
    )  # fmt: skip


def _resnet101_on_p100() -> float:
    """Images/s of one P100, for which TensorFlow's benchmarks give ResNet-50 and -152: seconds linear in FLOPs."""
    small, middle, large = (training_flops(REFERENCE_NETWORKS[f"resnet{depth}"]()) for depth in (50, 101, 152))
    share = (middle - small) / (large - small)
    return 1 / ((1 - share) / 219 + share / 91.8)


def _deeplab_on_summit() -> float:
    """Images/s of one V100 in fp32: 325.8 PFLOP/s on 27,360 at 90.7 %, over the network's FLOPs.

    It rests on the published efficiency, but says only how long backward is: with a fifth more or less of it, the
    predicted efficiency stays the same to a tenth of a point, because the all-reduce is hidden either way.
    """
    return 325.8e15 / 27_360 / 0.907 / training_flops(REFERENCE_NETWORKS["deeplab-v3-plus"]())


def published_points() -> tuple[PublishedPoint, ...]:
    """All figures, with the throughputs of one GPU that their sources give.

    NVIDIA's batch sizes are those of the repository's configs.yml: 256 a GPU, 112 in fp32 on a DGX-1.
    Single P100: TensorFlow's benchmarks of May 2017, batch 64, synthetic images (Inception-V3 142, VGG-16 154).
    """
    return (
        _nvidia("DGX-1, fp32", "dgx-v100", "fp32", 112, 367, 7.76, fits="jitter"),
        _nvidia("DGX-1, mixed precision", "dgx-v100", "amp", 256, 1200, 6.93, fits="input"),
        _nvidia("DGX-1 32 GB, fp32", "dgx-v100", "fp32", 112, 356, 7.75, fits=""),
        _nvidia("DGX-1 32 GB, mixed precision", "dgx-v100", "amp", 256, 1156, 6.96, fits=""),
        _nvidia("DGX A100, TF32", "dgx-a100", "fp32", 256, 938, 7.72, fits=""),
        _nvidia("DGX A100, mixed precision", "dgx-a100", "amp", 256, 2470, 6.72, fits="input"),
        _horovod("vgg16", 154, 0.68, fits="network"),
        _horovod("inception-v3", 142, 0.90),
        _horovod("resnet101", _resnet101_on_p100(), 0.90),
        PublishedPoint(
            "Summit, 27,360 V100, DeepLabv3+", _SUMMIT, "summit", "deeplab-v3-plus", "fp32", 1, _deeplab_on_summit(),
            27_360, 27_360 * 0.907, "horovod", ("hierarchical",),
        ),
        _dlperf("fp32", 128, 367.29, 8, 2887.65),
        _dlperf("fp32", 128, 367.29, 16, 5716.79),
        _dlperf("fp32", 128, 367.29, 32, 10917.09),
        _dlperf("amp", 256, 802.9, 8, 6154.66),
        _dlperf("amp", 256, 802.9, 16, 11991.94),
        _dlperf("amp", 256, 802.9, 32, 22551.16),
    )  # fmt: skip


@dataclass(frozen=True)
class Fitted:
    """The four numbers."""

    jitter_fraction: float
    input_images_per_second: dict[str, float]
    """By node type."""
    roce25_bytes_per_second: float

    def residue(self, node: str, real_input: bool = True) -> Residue:
        limit = self.input_images_per_second.get(node, math.inf) if real_input else math.inf
        return Residue(self.jitter_fraction, limit)


@dataclass(frozen=True)
class Comparison:
    point: PublishedPoint
    wire_only: float
    """Efficiency from bandwidths and latencies alone, nothing fitted."""
    model: float
    """Efficiency with all fitted numbers: no prediction where one was fitted to this very figure."""
    predicted: float
    """Efficiency with the numbers fitted to other figures."""

    @property
    def error_points(self) -> float:
        """Predicted less published, in percentage points of efficiency."""
        return 100 * (self.predicted - self.point.efficiency)


@functools.cache
def _profile_and_plans(point: PublishedPoint) -> tuple[StepProfile, tuple[TimedPlan, ...]]:
    """One GPU's step at its published throughput, and its bucket plans."""
    node = NODES[point.node]
    layers: Sequence[Layer] = REFERENCE_NETWORKS[point.model]()
    profile = profile_at_rate(
        point.model,
        layers,
        device=node.gpu,
        precision=point.precision,
        batch_size_per_rank=point.batch_size_per_rank,
        images_per_second=point.images_per_second,
        memory_bytes_per_second=node.memory_bytes_per_second,
    )
    return profile, tuple(candidate_plans(profile))


def fit(points: Sequence[PublishedPoint]) -> Fitted:
    """Solve for the four numbers, each from the figure that names it in `fits`, in order of dependence."""
    (for_jitter,) = (point for point in points if point.fits == "jitter")
    jitter = _solved(
        lambda fraction: _efficiency(for_jitter, Residue(jitter_fraction=fraction)), for_jitter.efficiency, 0.0, 0.5
    )
    # A node whose input is the bottleneck trains as many images as it delivers.
    limits = {point.node: point.scaling_factor * point.images_per_second for point in points if point.fits == "input"}
    (for_network,) = (point for point in points if point.fits == "network")
    line = 25e9 / 8
    bandwidth = _solved(
        lambda nic: _efficiency(for_network, Residue(jitter), nic), for_network.efficiency, 0.1 * line, line
    )
    return Fitted(jitter, limits, bandwidth)


def compare() -> tuple[Fitted, tuple[Comparison, ...]]:
    """Fit, then predict every published figure; one that was fitted to, without the number that it gave."""
    points = published_points()
    fitted = fit(points)
    rows = []
    for point in points:
        nic = fitted.roce25_bytes_per_second if point.node == "p100-roce25" else None
        residue = fitted.residue(point.node, point.real_input)
        model = _efficiency(point, residue, nic)
        if point.fits == "jitter":
            residue = dataclasses.replace(residue, jitter_fraction=0.0)
        elif point.fits == "input":
            residue = dataclasses.replace(residue, input_images_per_second=math.inf)
        elif point.fits == "network":
            nic = None
        rows.append(Comparison(point, _efficiency(point, Residue()), model, _efficiency(point, residue, nic)))
    return fitted, tuple(rows)


def _efficiency(point: PublishedPoint, residue: Residue, nic_bytes_per_second: float | None = None) -> float:
    where: Cluster = links.cluster(point.node, engine=point.engine, algorithms=point.algorithms)
    if nic_bytes_per_second is not None:
        where = links.with_nic(where, nic_bytes_per_second)
    profile, plans = _profile_and_plans(point)
    return predict(profile, where, point.ranks, residue, plans).efficiency


def _solved(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """The argument in [low, high] at which a monotonic function has the target value, by bisection."""
    rising = function(high) > function(low)
    for _ in range(40):
        middle = (low + high) / 2
        if (function(middle) < target) == rising:
            low = middle
        else:
            high = middle
    return (low + high) / 2
