"""ONNX files with weights of 8 bits: a quarter of the size, the same answers but for rounding.

Every row w of a weight, one for each output, is written as whole numbers q from -127 to 127 and a scale s = max |w| / 127,
w = s q up to s / 2. Activations stay in float32. Rows that are the same filter turned by different elements hold the same
numbers in another order where a turn is a permutation (z2 to p4m): they get the same scale and are rounded alike, so that an
exact model stays exact.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

LEAST = 1024
"""Smaller weights are not worth a scale."""
OUTPUT_AXIS = {"Conv": 0, "Gemm": 0, "MatMul": 1}
"""Operations whose second input is a weight, and the axis of its outputs."""


def quantise_weights(data: bytes) -> bytes:
    """An ONNX model with weights of 8 bits in place of float32, both as bytes."""
    onnx: Any = importlib.import_module("onnx")
    model = onnx.load_model_from_string(data)
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    nodes, done = [], set()
    for node in graph.node:
        name = node.input[1] if node.op_type in OUTPUT_AXIS else ""
        tensor = weights.get(name)
        if tensor is not None and _is_large(tensor, onnx):
            axis = 1 if node.op_type == "Gemm" and not _is_transposed(node) else OUTPUT_AXIS[node.op_type]
            if name not in done:
                rounded = zip(_round(onnx.numpy_helper.to_array(tensor), axis), ("int8", "scale"), strict=True)
                parts = [onnx.numpy_helper.from_array(values, f"{name}.{part}") for values, part in rounded]
                graph.initializer.extend(parts)
                inputs = [part.name for part in parts]
                nodes.append(onnx.helper.make_node("DequantizeLinear", inputs, [f"{name}.float"], axis=axis))
                done.add(name)
            node.input[1] = f"{name}.float"
        nodes.append(node)
    used = {name for node in nodes for name in node.input}
    for name in done - used:
        graph.initializer.remove(weights[name])
    del graph.node[:]
    graph.node.extend(nodes)
    return bytes(model.SerializeToString())


def _is_large(tensor: Any, onnx: Any) -> bool:
    return tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) >= 2 and np.prod(tensor.dims) >= LEAST


def _is_transposed(node: Any) -> bool:
    return any(attribute.name == "transB" and attribute.i for attribute in node.attribute)


def _round(weight: np.ndarray[Any, Any], axis: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    others = tuple(i for i in range(weight.ndim) if i != axis)
    largest = np.abs(weight).max(axis=others, keepdims=True)
    scales = np.where(largest > 0, largest / 127, 1).astype(np.float32)
    return np.rint(weight / scales).clip(-127, 127).astype(np.int8), scales.reshape(-1)
