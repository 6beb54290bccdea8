"""An fp32 ONNX file to int8: onnxruntime's static quantisation, ranges from calibration images.

Convolutions and what lies between them (sums, poolings, ReLU and ReLU6, resizing) compute in 8 bits: activations
unsigned, a scale a tensor; weights signed, a scale an output channel. The last convolutions, after which none follows,
and all behind them stay fp32: they hold coordinates, for which 256 values are too few.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perception.onnx_model import INPUT_NAME, require

_OPERATORS = ("Conv", "Add", "Relu", "Clip", "AveragePool", "GlobalAveragePool", "MaxPool", "Resize", "Concat", "Mul")
"""Clip, as ReLU6 is written, costs nothing then: the range of the 8 bits does it."""


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
        chosen = quantised_nodes(onnx.load(str(prepared)))
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
    return sum(types.get(name) == "Conv" for name in chosen)


def quantised_nodes(model: Any) -> list[str]:
    """Names of the nodes that compute in int8: convolutions that another follows, and nodes between two of them."""
    nodes = list(model.graph.node)
    producer = {name: node for node in nodes for name in node.output}
    above: set[int] = set()
    """Nodes from which a convolution follows."""
    pending = [name for node in nodes if node.op_type == "Conv" for name in node.input]
    while pending:
        node = producer.get(pending.pop())
        if node is not None and id(node) not in above:
            above.add(id(node))
            pending += node.input
    below: set[str] = set()
    """Tensors that come from a quantised convolution."""
    chosen = []
    # In an ONNX graph a node stands behind those whose outputs it takes.
    for node in nodes:
        if node.op_type not in _OPERATORS or id(node) not in above:
            continue
        if node.op_type == "Conv" or below.intersection(node.input):
            chosen.append(node.name)
            below.update(node.output)
    return chosen
