"""Times of one all-reduce, overlap with backward, and the scaling factor they give."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest

from perception.errors import UserError
from perception.scaling import links
from perception.scaling.allreduce_time import (
    allreduce_seconds,
    hierarchical_seconds,
    nvls_seconds,
    ring_seconds,
    tree_seconds,
)
from perception.scaling.overlap import (
    TimedBucket,
    best_plan,
    candidate_plans,
    exposed_seconds,
    timed_plan,
)
from perception.scaling.predict import Residue, expected_maximum, predict
from perception.scaling.profile import GradientReady, StepProfile

GB = 1e9


def _profile(numel: int = 1_000_000, count: int = 20, backward_seconds: float = 0.1) -> StepProfile:
    gradients = tuple(
        GradientReady(f"p{index}", numel, 4, backward_seconds * (index + 1) / count) for index in range(count)
    )
    return StepProfile("even", "GPU", "amp", 32, backward_seconds / 2, backward_seconds, 0.001, gradients)


@pytest.mark.parametrize("node", sorted(links.NODES))
@pytest.mark.parametrize("nodes", [1, 2, 16, 512])
def test_large_messages_run_at_the_bandwidth_of_the_slowest_link(node: str, nodes: int) -> None:
    cluster = links.cluster(node)
    ranks = nodes * cluster.node.gpus
    link = (
        cluster.node.ring_bytes_per_second
        if nodes == 1
        else min(cluster.node.ring_bytes_per_second, cluster.node.nics * cluster.nic_bytes_per_second)
    )
    size = 100e12  # so large that no latency counts
    assert ring_seconds(cluster, ranks, size) == pytest.approx(2 * (ranks - 1) / ranks * size / link, rel=0.01)
    # No algorithm sends less than the lower bound of what must leave a node.
    if nodes > 1:
        least = 2 * (nodes - 1) / nodes * size / cluster.node_bytes_per_second
        for algorithm in (ring_seconds, tree_seconds, nvls_seconds, hierarchical_seconds):
            assert algorithm(cluster, ranks, size) >= least


@pytest.mark.parametrize(
    ("node", "published_bus_bandwidth"), [("dgx-a100", 232.5), ("dgx-h100", 478), ("dgx-h200", 475), ("dgx-b200", 830)]
)
def test_bus_bandwidths_of_nccl_tests_come_out_at_large_sizes(node: str, published_bus_bandwidth: float) -> None:
    size = 8 * 2**30
    seconds, _ = allreduce_seconds(links.cluster(node), 8, size)
    assert 2 * 7 / 8 * size / seconds / GB == pytest.approx(published_bus_bandwidth, rel=0.02)


def test_trees_beat_rings_for_small_messages_on_many_nodes() -> None:
    cluster = links.cluster("dgx-a100")
    assert allreduce_seconds(cluster, 1024, 64 * 1024)[1] == "tree"
    assert allreduce_seconds(cluster, 16, 4 * 2**30)[1] == "ring"
    assert tree_seconds(cluster, 1024, 64) < ring_seconds(cluster, 1024, 64) / 10


@pytest.mark.parametrize("algorithm", [ring_seconds, tree_seconds, nvls_seconds, hierarchical_seconds])
def test_time_grows_with_bytes_and_with_nodes(algorithm: Callable[[links.Cluster, int, float], float]) -> None:
    cluster = links.cluster("dgx-h100")
    by_size = [algorithm(cluster, 64, size) for size in (1, 1e3, 1e6, 1e9)]
    assert by_size == sorted(by_size)
    by_nodes = [algorithm(cluster, 8 * nodes, 1e6) for nodes in (2, 4, 8, 64)]
    assert by_nodes == sorted(by_nodes)
    assert all(math.isfinite(seconds) and seconds > 0 for seconds in by_size + by_nodes)


def test_a_switch_adds_up_only_where_there_is_one_and_it_is_whole() -> None:
    assert math.isinf(nvls_seconds(links.cluster("dgx-a100"), 8, 1e6))
    assert math.isinf(nvls_seconds(links.cluster("dgx-h100"), 4, 1e6))
    with pytest.raises(ValueError, match="none of nvls"):
        allreduce_seconds(links.cluster("dgx-a100", algorithms=("nvls",)), 8, 1e6)


def test_partly_filled_nodes_and_unknown_names_are_refused() -> None:
    cluster = links.cluster("dgx-h100")
    assert cluster.shape(4) == (1, 4)
    assert cluster.shape(24) == (3, 8)
    with pytest.raises(UserError, match="multiple"):
        cluster.shape(12)
    with pytest.raises(UserError, match='"dgx-h100"'):
        links.cluster("dgx-h10")
    with pytest.raises(UserError, match="--network"):
        links.cluster("dgx-h100", "ethernet")


def test_exposed_time_by_hand() -> None:
    buckets = [TimedBucket(10, 1.0), TimedBucket(10, 2.0), TimedBucket(40, 3.0)]
    # Ends: 1 + 1.5 = 2.5, then 2.5 + 1.5 = 4, then 4 + 6 = 10.
    assert exposed_seconds(buckets, 3.0, lambda size: size * 0.15, 0.0) == pytest.approx(7.0)
    # Hidden but for the last bucket, which starts when backward ends.
    assert exposed_seconds(buckets, 3.0, lambda size: size * 0.01, 0.0) == pytest.approx(0.4)
    assert exposed_seconds(buckets, 3.0, lambda size: size * 0.01, 0.25) == pytest.approx(0.65)


def test_the_plan_holds_every_gradient_once_and_starts_its_last_bucket_at_the_end() -> None:
    profile = _profile()
    for plan in candidate_plans(profile):
        assert sum(bucket.num_bytes for bucket in plan.buckets) == profile.gradient_bytes
        ready = [bucket.ready_seconds for bucket in plan.buckets]
        assert ready == sorted(ready)
        assert ready[-1] == profile.backward_seconds
    one = timed_plan(profile, 256, 256)
    assert len(one.buckets) == 1


def test_the_best_plan_is_as_good_as_any_and_small_buckets_win_only_on_slow_links() -> None:
    profile = _profile()
    plans = candidate_plans(profile)

    def on(bytes_per_second: float, latency_seconds: float) -> tuple[float, list[float], int]:
        def seconds_of(num_bytes: int) -> float:
            return latency_seconds + num_bytes / bytes_per_second

        plan, exposed = best_plan(plans, profile.backward_seconds, seconds_of, 0.0)
        every = [exposed_seconds(each.buckets, profile.backward_seconds, seconds_of, 0.0) for each in plans]
        return exposed, every, len(plan.buckets)

    for exposed, every, _ in (on(1e9, 1e-5), on(1e12, 1e-5), on(1e10, 0.2)):
        assert exposed <= min(every) + profile.backward_seconds / 1000
    # Where starting takes longer than backward, one bucket is best.
    assert on(1e9, 1e-5)[2] > on(1e10, 0.2)[2] == 1


def test_expected_maximum_of_normal_draws() -> None:
    # Tabulated means of the largest order statistic (Harter 1961).
    for count, mean in ((1, 0.0), (2, 0.56419), (8, 1.42360), (100, 2.50759)):
        assert expected_maximum(count) == pytest.approx(mean, abs=1e-4)
    draws = np.random.default_rng(0).standard_normal((4000, 512)).max(axis=1)
    assert expected_maximum(512) == pytest.approx(draws.mean(), abs=0.03)


def test_one_rank_scales_to_exactly_one_and_more_never_lose_throughput() -> None:
    profile, residue = _profile(), Residue(0.02, 8000)
    cluster = links.cluster("dgx-h100")
    alone = predict(profile, cluster, 1, residue)
    assert alone.scaling_factor == 1.0
    assert alone.step_seconds == profile.step_seconds
    factors = [predict(profile, cluster, ranks, residue).scaling_factor for ranks in (1, 2, 4, 8, 16, 64, 1024)]
    assert factors == sorted(factors)
    assert all(factor <= ranks for factor, ranks in zip(factors, (1, 2, 4, 8, 16, 64, 1024), strict=True))


def test_the_parts_add_up_to_the_step() -> None:
    profile = _profile()
    found = predict(profile, links.cluster("dgx-v100"), 32, Residue(0.02, 1000))
    parts = found.exposed_seconds + found.copy_seconds + found.jitter_seconds + found.input_stall_seconds
    assert found.step_seconds == pytest.approx(profile.step_seconds + parts)
    assert found.scaling_factor == pytest.approx(32 * profile.step_seconds / found.step_seconds)
    # Bound by input, a node trains what the input delivers.
    assert 8 * profile.batch_size_per_rank / found.step_seconds == pytest.approx(1000)


def test_slower_networks_jitter_and_engines_cost() -> None:
    profile = _profile(numel=5_000_000)

    def factor(network: str | None = None, engine: str = "torch", jitter: float = 0.0) -> float:
        return predict(profile, links.cluster("dgx-h100", network, engine), 64, Residue(jitter)).scaling_factor

    assert factor("roce25") < factor("edr") <= factor("ndr")
    assert factor(engine="horovod") < factor(engine="torch")
    assert factor(jitter=0.05) < factor(jitter=0.01) < factor()


def test_memory_passes_count_once_per_byte() -> None:
    profile = _profile()
    cluster = links.cluster("dgx-h100")
    twice = dataclasses.replace(
        profile, gradients=tuple(dataclasses.replace(g, element_bytes=8) for g in profile.gradients)
    )
    assert predict(twice, cluster, 8).copy_seconds == pytest.approx(2 * predict(profile, cluster, 8).copy_seconds)
