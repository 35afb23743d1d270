"""Dense layers of 8-bit floating point numbers, e4m3, on a GPU.

The graph comes as the passes for bfloat16 leave it.  A layer whose inputs and outputs are multiples of
`STEP` becomes one of e4m3 weights and inputs, whose sums are float32.  What only such layers read is e4m3 from
the operator on that gives it: a layer with its bias and ReLU, a cross layer, a thin layer, a lookup and
the dense vector beside it.  Everything else stays bfloat16 or float32.

A tensor's numbers are stored in a unit, a power of two, so that nothing but the rounding changes a value
and scales multiply without error.  An activation's unit leaves `HEADROOM` above the largest magnitude that was
measured (`ranges`); what is larger all the same becomes the largest number.  e4m3 has 15 binary orders of
magnitude below that before it loses precision, so one unit for a tensor is as exact as one for each column.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from tessera.serving.packaging.passes.linears import linear_arguments, parameter
from tessera.serving.packaging.passes.narrow import LINEAR_RELU, NARROW
from tessera.serving.packaging.passes.ranges import largest_magnitudes
from tessera.serving.packaging.passes.registry import Pass, Target
from tessera.serving.packaging.passes.tensors import replace, seen

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of the type."""

HEADROOM = 2.0
"""How many times larger than any that was measured an activation may be."""

STEP = 16
"""Inputs and outputs of a layer: rows of whole 16 bytes, which cuBLASLt needs."""

_SCALE_STEP = 4  # numbers; the operators take scales that begin on multiples of 16 bytes


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """A layer in bfloat16: ``node`` gives its result from ``inputs``; a cross layer has three.

    Attributes:
        inputs: of a cross layer x0, x and v, otherwise one.
        relu: whether ``node`` is a ReLU, of a layer or joined with it.
    """

    node: fx.Node
    inputs: tuple[fx.Node, ...]
    weight: Tensor
    bias: Tensor | None
    relu: bool

    @property
    def crosses(self) -> bool:
        return len(self.inputs) == 3


@Pass(name="fp8", order=37, device="cuda", dense_dtype="fp8")
def make_fp8(module: fx.GraphModule, _target: Target) -> int:
    """Replace the layers in bfloat16, in place; returns the bytes saved."""
    rewriting = _Rewriting(module)
    rewriting.run()
    module.graph.eliminate_dead_code()
    return rewriting.saved


def unit_of(largest: float, headroom: float) -> float:
    """The smallest power of two in which ``headroom * largest`` is at most `LARGEST`; 1 of zeros."""
    if largest == 0:
        return 1.0
    return float(2.0 ** math.ceil(math.log2(headroom * largest / LARGEST)))


def to_fp8(values: Tensor, unit: float) -> Tensor:
    """``values`` in ``unit``, rounded to e4m3."""
    return (values.float() / unit).clamp(-LARGEST, LARGEST).to(FLOAT8)


class _Rewriting:
    """One pass over a graph.

    Attributes:
        saved: bytes of weights.
        layers: those to replace, by the node that gives their result.
        fp8: the nodes whose operators will give e4m3.
        units: by node, of the e4m3 form of its tensor.
        moved: by node of the graph as it came, what stands in its place.
        casts: by node and unit, the node that gives its tensor as e4m3 where its operator does not.
        weights: by address, the buffer with a weight, which several calls may share, and its unit.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.graph = module, module.graph
        self.saved = 0
        self.layers = {
            layer.node: layer
            for node in module.graph.nodes
            if (layer := _layer(module, node)) is not None
        }
        self.fp8 = {node for node in module.graph.nodes if self._gives_fp8(node)}
        denses = {node: node.kwargs["dense"] for node in self.fp8 if "dense" in node.kwargs}
        self.denses = {lookup: dense for lookup, dense in denses.items() if dense is not None}
        crosses = {layer.node for layer in self.layers.values() if layer.crosses}
        inputs = {x for layer in self.layers.values() for x in layer.inputs}
        largest = largest_magnitudes(module, inputs | crosses | self.fp8)
        self.units = {node: unit_of(size, HEADROOM) for node, size in largest.items()}
        for lookup, dense in self.denses.items():
            if dense in self.fp8:
                self.units[dense] = self.units[lookup]
        self.moved: dict[fx.Node, fx.Node] = {}
        self.casts: dict[tuple[fx.Node, float], fx.Node] = {}
        self.weights: dict[int, tuple[str, float]] = {}

    def run(self) -> None:
        """Replace every layer, and what gives its inputs, in the graph's order."""
        for number, node in enumerate(list(self.graph.nodes)):
            with self.graph.inserting_before(node):
                if node in self.layers:
                    layer = self.layers[node]
                    put = self._cross if layer.crosses else self._linear
                    self.moved[node] = new = put(layer, f"fp8_{number}")
                    replace(node, new)
                elif node in self.fp8:
                    self._narrow_source(node)

    def _gives_fp8(self, node: fx.Node) -> bool:
        """Whether an operator can give e4m3 and only layers of e4m3 read it."""
        source = node in self.layers or (
            node.target in {torch.ops.tessera.lookup, torch.ops.tessera.linear_thin}
            and node.kwargs.get("dtype") == NARROW
        )
        return (
            source
            and len(node.users) > 0
            and all(
                user in self.layers or (_is_dense_of(node, user) and self._gives_fp8(user))
                for user in node.users
            )
        )

    def _as_fp8(self, node: fx.Node, unit: float) -> fx.Node:
        """What gives a tensor as e4m3; it is inserted where the tensor's operator does not."""
        there = self.moved.get(node, node)
        if node in self.fp8:
            return there
        if (node, unit) not in self.casts:
            scaled = self.graph.call_function(operator.mul, (there, 1 / unit))
            bounded = self.graph.call_function(torch.clamp, (scaled, -LARGEST, LARGEST))
            self.casts[node, unit] = self.graph.call_method("to", (bounded, FLOAT8))
        return self.casts[node, unit]

    def _narrow_source(self, node: fx.Node) -> None:
        unit = self.units[node]
        options = {**node.kwargs, "dtype": FLOAT8, "scale": 1 / unit}
        if node in self.denses:
            options["dense"] = self._as_fp8(self.denses[node], unit)
        node.kwargs = options

    def _linear(self, layer: _Layer, name: str) -> fx.Node:
        (x,) = layer.inputs
        given = self.units[x]
        made = self.units[layer.node] if layer.node in self.fp8 else 1.0
        weight, unit = self._weight(layer.weight, f"{name}_weight")
        bias = None if layer.bias is None else self._bias(layer.bias / made, f"{name}_bias")
        scales = self._scales(f"{name}_scales", given / made, unit)
        dtype = FLOAT8 if layer.node in self.fp8 else NARROW
        arguments = (self._as_fp8(x, given), weight, bias, scales, layer.relu, dtype)
        return self.graph.call_function(torch.ops.tessera.linear_fp8, arguments)

    def _cross(self, layer: _Layer, name: str) -> fx.Node:
        x0, x, v = (self.units[given] for given in layer.inputs)
        made = self.units[layer.node]
        weight, unit = self._weight(layer.weight, f"{name}_weight")
        assert layer.bias is not None
        bias = self._bias(layer.bias * (x0 / made), f"{name}_bias")
        scales = self._scales(f"{name}_scales", v * unit * x0 / made, x / made)
        inputs = [self._as_fp8(given, self.units[given]) for given in layer.inputs]
        new = self.graph.call_function(
            torch.ops.tessera.cross_layer_fp8, (*inputs, weight, bias, scales)
        )
        if layer.node in self.fp8:
            return new
        return self.graph.call_function(
            operator.mul, (self.graph.call_method("to", (new, NARROW)), made)
        )

    def _buffer(self, tensor: Tensor, name: str) -> fx.Node:
        self.module.register_buffer(name, tensor)
        return self.graph.get_attr(name)

    def _scales(self, name: str, *scales: float) -> fx.Node:
        spaced = torch.ones(len(scales), _SCALE_STEP)
        spaced[:, 0] = torch.tensor(scales)
        return self._buffer(spaced.flatten(), name)

    def _bias(self, bias: Tensor, name: str) -> fx.Node:
        return self._buffer(bias.to(NARROW), name)

    def _weight(self, weight: Tensor, name: str) -> tuple[fx.Node, float]:
        if weight.data_ptr() not in self.weights:
            unit = unit_of(float(weight.float().abs().max()), 1.0)
            self.saved += weight.numel() * (NARROW.itemsize - FLOAT8.itemsize)
            self.weights[weight.data_ptr()] = name, unit
            return self._buffer(to_fp8(weight, unit), name), unit
        stored, unit = self.weights[weight.data_ptr()]
        return self.graph.get_attr(stored), unit


def _is_dense_of(node: fx.Node, user: fx.Node) -> bool:
    lookup = user.target is torch.ops.tessera.lookup
    return lookup and user.kwargs.get("dense") is node and len(node.users) == 1


def _layer(module: fx.GraphModule, node: fx.Node) -> _Layer | None:
    """The layer in bfloat16 that ends in ``node``, if its sizes are multiples of `STEP`."""
    readers: dict[Any, Callable[[fx.GraphModule, fx.Node], _Layer | None]] = {
        nn.functional.linear: _of_linear,
        LINEAR_RELU: _of_linear_relu,
        torch.ops.tessera.cross_layer: _of_cross,
    }
    reader = readers.get(node.target) if node.op == "call_function" else None
    found = None if reader is None else reader(module, node)
    if found is None or found.weight.dtype != NARROW:
        return None
    return None if any(size % STEP for size in found.weight.shape) else found


def _of_linear(module: fx.GraphModule, node: fx.Node) -> _Layer | None:
    x, weight, bias = linear_arguments(node)
    fixed, added = parameter(module, weight), None if bias is None else parameter(module, bias)
    if fixed is None or (bias is not None and added is None) or not _is_matrix(x):
        return None
    return _Layer(node=node, inputs=(x,), weight=fixed, bias=added, relu=False)


def _is_matrix(node: fx.Node) -> bool:
    """Whether a node is known to give a matrix of contiguous rows."""
    known = seen(node)
    if known is not None:
        return len(known.shape) == 2 and known.contiguous_rows
    is_cast = node.op == "call_method" and node.target == "to"
    if is_cast or node.target is nn.functional.linear:
        return _is_matrix(node.all_input_nodes[0])
    return node.target in {
        LINEAR_RELU,
        torch.ops.tessera.cross_layer,
        torch.ops.tessera.linear_thin,
        torch.ops.tessera.lookup,
    }


def _of_linear_relu(module: fx.GraphModule, node: fx.Node) -> _Layer | None:
    bias, x, transposed = node.args
    assert isinstance(bias, fx.Node)
    assert isinstance(x, fx.Node)
    assert isinstance(transposed, fx.Node)
    weight = transposed.args[0] if transposed.target == "t" else None
    fixed = parameter(module, weight) if isinstance(weight, fx.Node) else None
    added = parameter(module, bias)
    if fixed is None or added is None:
        return None
    return _Layer(node=node, inputs=(x,), weight=fixed, bias=added, relu=True)


def _of_cross(module: fx.GraphModule, node: fx.Node) -> _Layer | None:
    x0, x, v, weight, bias = node.args
    fixed, added = (parameter(module, part) for part in (weight, bias) if isinstance(part, fx.Node))
    if fixed is None or added is None:
        return None
    inputs: Any = (x0, x, v)
    return _Layer(node=node, inputs=inputs, weight=fixed, bias=added, relu=False)
