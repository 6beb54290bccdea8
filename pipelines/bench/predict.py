"""`bench predict`: the scaling factor of a model's training on a cluster, from its links and one GPU's step."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perception.errors import UserError, nearest
from perception.run_folder import check_folder_of, write_json
from perception.scaling.links import NETWORKS, NODES
from perception.scaling.reference_networks import REFERENCE_NETWORKS
from pipelines.configs import CONFIGS, named_config

if TYPE_CHECKING:
    from perception.scaling.links import Cluster, NodeType
    from perception.scaling.predict import Prediction, Residue
    from perception.scaling.profile import StepProfile

_MOST_NODES = 1 << 14


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help=f"{', '.join(CONFIGS)}, {', '.join(REFERENCE_NETWORKS)}, or a recorded PROFILE.json"
    )
    parser.add_argument("--node", default="dgx-h100", metavar="TYPE", help=", ".join(NODES))
    parser.add_argument("--nodes", default="1..16", metavar="N..M", help="1..128 (doubling), a number, or 1,3,12")
    parser.add_argument("--network", metavar="NAME", help=f"{', '.join(NETWORKS)}; the node type's own by default")
    parser.add_argument("--batch", type=int, metavar="B", help="images of one GPU's step")
    parser.add_argument("--precision", choices=("amp", "fp32"), default="amp")
    parser.add_argument(
        "--images-per-second", type=float, metavar="R", help="measured on one GPU; else from FLOPs or the profile"
    )
    parser.add_argument(
        "--input-images-per-second", type=float, metavar="R", help="most that a node's input delivers; else no bound"
    )
    parser.add_argument(
        "--jitter-fraction", type=float, metavar="F", help="deviation of a GPU's step; else as fitted to a DGX-1"
    )
    parser.add_argument("--engine", choices=("horovod", "torch"), default="horovod")
    parser.add_argument(
        "--algorithm", choices=("nccl", "ring", "tree", "hierarchical"), default="nccl", help="nccl takes its fastest"
    )
    parser.add_argument("--published", action="store_true", help="compare predictions with published figures instead")
    parser.add_argument(
        "--here", action="store_true", help="predict and measure ranks on this host's cores instead (--model, --ranks)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="with --here")
    parser.add_argument("--rounds", type=int, default=7, help="with --here")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="with --here")
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures there too")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    from pipelines.bench import predict_here

    if options.rank_of is not None:
        return predict_here.run_rank(options.rank_of)
    check_folder_of("--json", options.json)
    if options.published:
        figures = print_published()
    elif options.model is None:
        raise UserError("bench predict: give --model, or --published for the comparison with published figures")
    elif options.here:
        figures = predict_here.compare(options.model, options.ranks, options.rounds, options.batch, options.set)
    else:
        figures = print_predictions(options)
    if options.json is not None:
        write_json(options.json, figures)
    return 0


def print_predictions(options: argparse.Namespace) -> dict[str, Any]:
    """Predict for each number of GPUs, print a table, and return it."""
    from perception.scaling import links
    from perception.scaling.overlap import candidate_plans
    from perception.scaling.predict import Residue, predict

    algorithms = links.NCCL_ALGORITHMS if options.algorithm == "nccl" else (options.algorithm,)
    cluster = links.cluster(options.node, options.network, options.engine, algorithms)
    profile, source = profile_for(options, cluster.node)
    jitter, jitter_source = options.jitter_fraction, "given"
    if jitter is None:
        from perception.scaling.published import fit, published_points

        jitter, jitter_source = fit(published_points()).jitter_fraction, "fitted to NVIDIA's DGX-1 in fp32"
    limit = math.inf if options.input_images_per_second is None else options.input_images_per_second
    if not 0 <= jitter < 1 or limit <= 0:
        raise UserError("--jitter-fraction must be in [0, 1) and --input-images-per-second above 0")
    residue = Residue(jitter, limit)
    plans = candidate_plans(profile)
    ranks = gpu_counts(options.nodes, cluster.node.gpus)
    rows = [predict(profile, cluster, count, residue, plans) for count in ranks]
    _print_assumptions(profile, source, cluster, residue, jitter_source)
    _print_rows(rows)
    return {
        "model": profile.model,
        "node": cluster.node.name,
        "network_bytes_per_second_per_nic": cluster.nic_bytes_per_second,
        "engine": options.engine,
        "profile": {"source": source, **_summary(profile)},
        "jitter_fraction": jitter,
        "input_images_per_second_per_node": None if math.isinf(limit) else limit,
        "rows": [{**dataclasses.asdict(row), "efficiency": row.efficiency} for row in rows],
    }


def profile_for(options: argparse.Namespace, node: NodeType) -> tuple[StepProfile, str]:
    """(one GPU's step, where it comes from): a recorded file, or a layer table at a measured or assumed pace.

    Raises UserError for an unknown model, a bad file, or a batch that does not fit a recorded one.
    """
    from perception.scaling.layers import LAUNCH_SECONDS, profile_at_flops, profile_at_rate
    from perception.scaling.profile import read_profile, scaled

    rate = options.images_per_second
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise UserError(f"--images-per-second {rate}: must be above 0")
    if options.model.endswith(".json"):
        recorded = read_profile(Path(options.model))
        if options.batch not in (None, recorded.batch_size_per_rank):
            raise UserError(f"--batch {options.batch}: {options.model} was recorded at {recorded.batch_size_per_rank}")
        if rate is None:
            return recorded, f"recorded on {recorded.device}"
        stretched = scaled(recorded, rate, node.gpu)
        return stretched, f"recorded on {recorded.device}, stretched to {rate:g} images/s"
    layers, batch = _layers_and_batch(options.model)
    batch = batch if options.batch is None else options.batch
    if batch < 1:
        raise UserError(f"--batch {batch}: must be at least 1")
    if rate is not None:
        profile = profile_at_rate(
            options.model, layers, device=node.gpu, precision=options.precision, batch_size_per_rank=batch,
            images_per_second=rate, memory_bytes_per_second=node.memory_bytes_per_second,
        )  # fmt: skip
        return profile, f"{rate:g} images/s of one GPU as given, shared out by FLOPs"
    flops = node.flops_per_second[options.precision]
    profile = profile_at_flops(
        options.model, layers, device=node.gpu, precision=options.precision, batch_size_per_rank=batch,
        flops_per_second=flops, memory_bytes_per_second=node.memory_bytes_per_second,
    )  # fmt: skip
    return (
        profile,
        f"layer table at an assumed {flops / 1e12:.0f} TFLOP/s, no layer below {LAUNCH_SECONDS * 1e6:.0f} us",
    )


def _layers_and_batch(model: str) -> tuple[Any, int]:
    if model in REFERENCE_NETWORKS:
        return REFERENCE_NETWORKS[model](), 1 if model == "deeplab-v3-plus" else 256
    if model not in CONFIGS:
        hint = nearest(model, [*CONFIGS, *REFERENCE_NETWORKS])
        raise UserError(f'--model "{model}" is unknown{hint}; or give a recorded PROFILE.json')
    from perception.scaling.layer_shapes import model_layers

    config = named_config(model)
    return model_layers(config), config.train.batch_size_per_rank


def gpu_counts(nodes: str, gpus_per_node: int) -> list[int]:
    """Numbers of GPUs for a text such as 1..128, 4 or 1,3,12; a range from 1 begins with parts of a node.

    >>> gpu_counts("1..4", 8)
    [1, 2, 4, 8, 16, 32]
    """
    first, separator, last = nodes.partition("..")
    try:
        counts = [int(first), int(last)] if separator else [int(text) for text in nodes.split(",")]
    except ValueError:
        raise UserError(f"--nodes {nodes}: write 1..128, a number, or numbers as 1,3,12") from None
    if min(counts) < 1 or max(counts) > _MOST_NODES or (separator and counts[0] > counts[1]):
        raise UserError(f"--nodes {nodes}: must rise and lie between 1 and {_MOST_NODES}")
    if not separator:
        return [count * gpus_per_node for count in counts]
    low, high = counts
    parts = (
        [1 << power for power in range(gpus_per_node.bit_length()) if 1 << power < gpus_per_node] if low == 1 else []
    )
    doubled = [low << power for power in range(high.bit_length()) if low << power < high]
    return parts + [count * gpus_per_node for count in [*doubled, high]]


def _print_assumptions(
    profile: StepProfile, source: str, cluster: Cluster, residue: Residue, jitter_source: str
) -> None:
    from perception.scaling.links import ASSUMED_THROUGHPUT

    node = cluster.node
    print(
        f"{profile.model}, {profile.precision}, batch {profile.batch_size_per_rank} a GPU, {len(profile.gradients)} "
        f"gradients of {profile.gradient_bytes / 1e6:.1f} MB, on {node.gpus} x {node.gpu} a node ({node.name}), "
        f"{node.nics} NICs of {cluster.nic_bytes_per_second / 1e9:.1f} GB/s"
    )
    print(f"one GPU: {profile.step_seconds * 1e3:.2f} ms a step, {profile.images_per_second:.0f} images/s; {source}")
    if "assumed" in source:
        print(f"assumed: {ASSUMED_THROUGHPUT}; give --images-per-second where it was measured")
    limit = residue.input_images_per_second
    bound = "not counted; give --input-images-per-second" if math.isinf(limit) else f"at most {limit:g} images/s a node"
    print(f"jitter {residue.jitter_fraction:.2%} of a step ({jitter_source}); input {bound}\n")


def _print_rows(rows: list[Prediction]) -> None:
    print(
        f"{'GPUs':>6} {'step ms':>9} {'exposed':>9} {'copies':>8} {'jitter':>8} {'stall':>8} "
        f"{'scaling':>9} {'efficiency':>11}  buckets (first, others MiB)  algorithm"
    )
    for row in rows:
        plan = "-"
        if row.ranks > 1:
            plan = f"{row.num_buckets:3d} ({row.first_bucket_mib:g}, {row.bucket_mib:g})"
        print(
            f"{row.ranks:>6} {row.step_seconds * 1e3:>9.2f} {row.exposed_seconds * 1e3:>9.3f} "
            f"{row.copy_seconds * 1e3:>8.3f} {row.jitter_seconds * 1e3:>8.3f} {row.input_stall_seconds * 1e3:>8.2f} "
            f"{row.scaling_factor:>9.2f} {row.efficiency:>11.1%}  {plan:<27}  {'/'.join(row.algorithms)}"
        )


def print_published() -> dict[str, Any]:
    """Compare with published figures, print a table that marks what was fitted, and return it."""
    from perception.scaling.published import compare

    fitted, rows = compare()
    inputs = ", ".join(f"{node} {rate:.0f} images/s" for node, rate in fitted.input_images_per_second.items())
    print(
        f"fitted to the rows so marked: jitter {fitted.jitter_fraction:.2%} of a step on all nodes; input of {inputs}; "
        f"25 Gb RoCE NIC {fitted.roce25_bytes_per_second / 1e9:.2f} GB/s\n"
    )
    print(f"{'':33} {'GPUs':>6} {'published':>15} {'wire only':>10} {'model':>7} {'predicted':>10} {'points':>7}")
    for row in rows:
        point = row.point
        seen = f"{point.scaling_factor:.2f} {point.efficiency:.1%}"
        note = f"  model fitted here: {point.fits}" if point.fits else ""
        print(
            f"{point.name:33} {point.ranks:>6} {seen:>15} {row.wire_only:>10.1%} {row.model:>7.1%} "
            f"{row.predicted:>10.1%} {row.error_points:>+7.1f}{note}"
        )
    held_out = [abs(row.error_points) for row in rows if not row.point.fits]
    print(
        f"\nwire only: bandwidths and latencies; predicted: with the numbers fitted to other rows. Of {len(held_out)} "
        f"rows that nothing was fitted to, {sum(error <= 5 for error in held_out)} within 5 points; mean error "
        f"{sum(held_out) / len(held_out):.1f}, largest {max(held_out):.1f} points"
    )
    return {
        "fitted": dataclasses.asdict(fitted),
        "rows": [
            {
                **dataclasses.asdict(row.point),
                "efficiency": row.point.efficiency,
                "wire_only_efficiency": row.wire_only,
                "model_efficiency": row.model,
                "predicted_efficiency": row.predicted,
                "error_points": row.error_points,
            }
            for row in rows
        ],
    }


def _summary(profile: StepProfile) -> dict[str, Any]:
    summary = dataclasses.asdict(profile)
    del summary["gradients"]
    return {**summary, "num_gradients": len(profile.gradients), "gradient_bytes": profile.gradient_bytes}
