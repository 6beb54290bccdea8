"""An fp32 ONNX file to int8: onnxruntime's static quantisation, ranges from calibration images.

Convolutions and what lies between them (sums, poolings, ReLU and ReLU6, resizing) compute in 8 bits: activations
unsigned, a scale a tensor; weights signed, a scale an output channel. What holds coordinates stays fp32, as 256 values
are too few for them: convolutions that no learnt layer follows, and all behind the last ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perception.onnx_model import INPUT_NAME, require

_OPERATORS = ("Conv", "Add", "Relu", "Clip", "AveragePool", "GlobalAveragePool", "MaxPool", "Resize", "Concat", "Mul")
"""Clip, as ReLU6 is written, costs nothing then: the range of the 8 bits does it."""
_NUM_FEATURES = 16
"""With fewer output channels a convolution whose values are not convolved again may give directions or places."""


class _Calibration:
    """onnxruntime's CalibrationDataReader by its one method."""

    def __init__(self, batches: Iterator[NDArray[np.uint8]]) -> None:
        self._batches = batches

    def get_next(self) -> dict[str, NDArray[np.uint8]] | None:
        batch = next(self._batches, None)
        return None if batch is None else {INPUT_NAME: batch}


def quantise(source: Path, target: Path, batches: Iterator[NDArray[np.uint8]]) -> int:
    """Write the int8 form of `source`; `batches` are (B, H, W, 3) uint8 RGB. Returns the number of int8 convolutions.

    Ranges are the least and greatest values seen over all batches.
    """
    onnx, quantization = require("onnx"), require("onnxruntime.quantization")
    prepared = target.with_suffix(".prepared.onnx")
    root = logging.getLogger()
    level = root.level
    # It logs advice for its own caller as warnings of the root logger.
    root.setLevel(logging.ERROR)
    try:
        require("onnxruntime.quantization.shape_inference").quant_pre_process(
            str(source), str(prepared), skip_symbolic_shape=True
        )
        model = onnx.load(str(prepared))
        pools = pools_to_convolutions(model)
        onnx.save(model, str(prepared))
        chosen = quantised_nodes(model)
        quantization.quantize_static(
            str(prepared),
            str(target),
            _Calibration(batches),
            quant_format=quantization.QuantFormat.QDQ,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            per_channel=True,
            op_types_to_quantize=list(_OPERATORS),
            nodes_to_quantize=chosen,
            # Keeps two numbers a tensor and batch. Not CalibMaxIntermediateOutputs: onnxruntime 1.32 then forgets
            # every full group of batches, and takes the ranges from the last few.
            calibrate_method=quantization.CalibrationMethod.MinMax,
        )
    finally:
        root.setLevel(level)
        prepared.unlink(missing_ok=True)
    types = {node.name: node.op_type for node in onnx.load(str(target)).graph.node}
    return sum(types.get(name) == "Conv" for name in chosen if name not in pools)


def pools_to_convolutions(model: Any) -> set[str]:
    """Write each average over equal steps as a convolution of every channel by itself; returns the names of those.

    It is the same sum, and in 8 bits onnxruntime computes it several times as fast.
    """
    onnx = require("onnx")
    graph = model.graph
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*graph.value_info, *graph.input)}
    names = set()
    for place, node in enumerate(graph.node):
        if node.op_type != "AveragePool" or len(shapes.get(node.input[0], ())) != 4:
            continue
        channels = shapes[node.input[0]][1].dim_value
        attributes = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
        kernel, padded = attributes["kernel_shape"], any(attributes.get("pads", ()))
        automatic = attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID")
        dilated = any(step != 1 for step in attributes.get("dilations", ()))
        if not channels or padded or automatic or dilated or attributes.get("ceil_mode"):
            continue
        weight = f"{node.name}.mean"
        mean = np.full((channels, 1, *kernel), 1 / np.prod(kernel), np.float32)
        graph.initializer.append(onnx.numpy_helper.from_array(mean, weight))
        convolution = onnx.helper.make_node(
            "Conv",
            [node.input[0], weight],
            list(node.output),
            name=node.name,
            kernel_shape=kernel,
            strides=attributes.get("strides", [1] * len(kernel)),
            group=channels,
        )
        graph.node[place].CopyFrom(convolution)
        names.add(node.name)
    return names


def quantised_nodes(model: Any) -> list[str]:
    """Names of the nodes that compute in int8: convolutions that a learnt layer follows, and what lies between two.

    Between a convolution and a matrix product there may be places in the image, by which features are looked up.
    """
    nodes = list(model.graph.node)
    learnt = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    convolutions = [node for node in nodes if node.op_type == "Conv"]
    products = [
        node for node in nodes if node.op_type in ("Gemm", "MatMul") and not learnt.keys().isdisjoint(node.input)
    ]
    above_convolutions, above_products = _above(nodes, convolutions), _above(nodes, products)
    below: set[str] = set()
    """Tensors that come from a quantised convolution."""
    chosen = []
    # In an ONNX graph a node stands behind those whose outputs it takes.
    for node in nodes:
        is_convolved_again = id(node) in above_convolutions
        if node.op_type == "Conv":
            num_channels = next(iter(learnt.get(node.input[1], ())), 0)
            wanted = is_convolved_again or (id(node) in above_products and num_channels >= _NUM_FEATURES)
        else:
            wanted = is_convolved_again and node.op_type in _OPERATORS and not below.isdisjoint(node.input)
        if wanted:
            chosen.append(node.name)
            below.update(node.output)
    return chosen


def _above(nodes: Sequence[Any], some: Sequence[Any]) -> set[int]:
    """The ids of the nodes from which one of `some` follows."""
    producer = {name: node for node in nodes for name in node.output}
    found: set[int] = set()
    pending = [name for node in some for name in node.input]
    while pending:
        node = producer.get(pending.pop())
        if node is not None and id(node) not in found:
            found.add(id(node))
            pending += node.input
    return found
