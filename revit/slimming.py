"""ONNX graphs without what only people who debug an exporter read, in as few bytes: of small models that was most of the file.

The graph computes the same. Inputs and outputs keep their names; all else is named a, b, c, ...
"""

from __future__ import annotations

import importlib
from itertools import count, product
from string import ascii_letters, digits
from typing import Any

PLAIN = {"strides": 1, "dilations": 1, "pads": 0}
"""What convolutions and pooling do along every axis unless they say otherwise; ONNX has no default of unknown length."""


def slim(model: Any) -> Any:
    """Changes an ONNX model in place, and returns it."""
    graph = model.graph
    del graph.value_info[:], graph.metadata_props[:], model.metadata_props[:]
    shared = _share_constants(graph)
    ends = {value.name for value in (*graph.input, *graph.output)}
    fresh = (name for name in _names() if name not in ends)
    short = {"": "", **{name: name for name in ends}}

    def rename(name: str) -> str:
        name = shared.get(name, name)
        if name not in short:
            short[name] = next(fresh)
        return short[name]

    shapes = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        node.name = node.doc_string = ""
        del node.metadata_props[:]
        _leave_out_defaults(node, model.opset_import, shapes)
        for names in (node.input, node.output):
            names[:] = [rename(name) for name in names]
    for value in (*graph.input, *graph.output, *graph.initializer):
        del value.metadata_props[:]
        value.doc_string = ""
    for tensor in graph.initializer:
        tensor.name = rename(tensor.name)
        _write_small(tensor)
    return model


def _names() -> Any:
    for length in count(1):
        for letters in product(ascii_letters, *[ascii_letters + digits] * (length - 1)):
            yield "".join(letters)


def _share_constants(graph: Any) -> dict[str, str]:
    """Keeps one of equal constants; the names of the others, and whose tensor they now mean."""
    seen: dict[tuple[Any, ...], str] = {}
    shared = {}
    for tensor in list(graph.initializer):
        key = (tensor.data_type, *tensor.dims, tensor.raw_data)
        first = seen.setdefault(key, tensor.name) if tensor.raw_data else tensor.name
        if first != tensor.name:
            shared[tensor.name] = first
            graph.initializer.remove(tensor)
    return shared


def _leave_out_defaults(node: Any, opsets: Any, constants: dict[str, Any]) -> None:
    """Attributes that say what holds without them."""
    onnx: Any = importlib.import_module("onnx")
    version = {opset.domain: opset.version for opset in opsets}[node.domain]
    if not onnx.defs.has(node.op_type, version, node.domain):
        return
    known = onnx.defs.get_schema(node.op_type, version, node.domain).attributes
    for attribute in list(node.attribute):
        default = known[attribute.name].default_value
        value = onnx.helper.get_attribute_value(attribute)
        says_nothing = default.name and onnx.helper.get_attribute_value(default) == value
        if node.op_type in ("Conv", "MaxPool", "AveragePool") and attribute.name in PLAIN:
            says_nothing = set(value) == {PLAIN[attribute.name]}
        if attribute.name == "allowzero" and node.input[1] in constants:  # of no meaning where no length is zero
            says_nothing = says_nothing or onnx.numpy_helper.to_array(constants[node.input[1]]).all()
        if says_nothing:
            node.attribute.remove(attribute)


def _write_small(tensor: Any) -> None:
    """Whole numbers are written in as many bytes as they need, not in 8, where that is shorter."""
    onnx: Any = importlib.import_module("onnx")
    if tensor.data_type == onnx.TensorProto.INT64 and tensor.raw_data:
        packed = onnx.TensorProto(dims=tensor.dims, data_type=tensor.data_type, name=tensor.name)
        packed.int64_data.extend(onnx.numpy_helper.to_array(tensor).flatten().tolist())
        if packed.ByteSize() < tensor.ByteSize():
            tensor.CopyFrom(packed)
