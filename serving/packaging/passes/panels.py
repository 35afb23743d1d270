"""Let Tessera's operator compute every dense layer on a CPU, with the ReLU behind it.

Its layouts of weights are the same for every processor and lie in the archive as they are.  A row's bits
do not depend on the other rows of its batch.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from tessera.serving.packaging.dense_types import DENSE_TYPES
from tessera.serving.packaging.passes.linears import Linear, replace_linears
from tessera.serving.packaging.passes.registry import Pass, Target


@Pass(name="panels", order=20, backend="tessera", device="cpu")
def pack_panels(module: fx.GraphModule, target: Target) -> int:
    """Make every linear function ``tessera::linear`` or its kin in place; the bytes saved."""
    kind = DENSE_TYPES[target.dense_dtype]
    saved = 0
    packed: dict[tuple[int, int], list[str]] = {}  # a layer may be called several times

    def stored(name: str, linear: Linear) -> list[str]:
        nonlocal saved
        saved += kind.saved_bytes(linear.weight)
        names = []
        # Buffers of the graph's own module: a class for each layer would be written to the
        # archive in an order that differs from run to run.
        assert kind.pack is not None
        tensors = kind.pack(linear.weight, linear.bias)
        for what, tensor in zip(("weights", "bias"), tensors, strict=True):
            module.register_buffer(f"{name}_{what}", tensor)
            names.append(f"{name}_{what}")
        return names

    def call_tessera(name: str, x: fx.Node, linear: Linear, *, relu: bool) -> fx.Node | None:
        if linear.of_vector:
            return None
        if linear.key not in packed:
            packed[linear.key] = stored(name, linear)
        buffers = [module.graph.get_attr(buffer) for buffer in packed[linear.key]]
        graph, rows = module.graph, x
        if not linear.of_matrix:
            rows = graph.call_method("flatten", (x, 0, -2))
        if not linear.contiguous_rows:
            rows = graph.call_method("contiguous", (rows,))
        product = graph.call_function(
            kind.operator, (rows, buffers[0], buffers[1], len(linear.weight), relu)
        )
        if linear.of_matrix:
            return product
        shape = graph.call_function(getattr, (x, "shape"))
        outer = graph.call_function(operator.getitem, (shape, slice(None, -1)))
        return graph.call_function(torch.unflatten, (product, 0, outer))

    replace_linears(module, call_tessera)
    return saved
