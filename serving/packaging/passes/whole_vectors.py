"""Give elementwise functions the same bits wherever in a batch an element stands, on a CPU.

torch computes whole blocks of `VECTOR_BLOCK` numbers with vector instructions and the rest with scalar
ones, whose ``exp`` and its kin round differently.  Here they get whole blocks only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from tessera.serving.packaging.passes.registry import Pass, Target
from tessera.serving.packaging.passes.tensors import SEEN, seen
from tessera.serving.packaging.stable_names import named_in_packages

VECTOR_BLOCK = 32
"""Elements of two AVX-512 registers, the block of torch's elementwise loops; narrower
instruction sets have blocks that divide it."""

FUNCTIONS: frozenset[Any] = frozenset(
    [
        *(torch.sigmoid, torch.tanh, torch.exp, torch.expm1, torch.log, torch.log1p, torch.erf),
        *(torch.sin, torch.cos, nn.functional.softplus, nn.functional.silu, nn.functional.gelu),
        *(nn.functional.elu, nn.functional.selu, nn.functional.mish, nn.functional.logsigmoid),
        *("sigmoid", "tanh", "exp", "expm1", "log", "log1p", "erf", "sin", "cos"),
    ]
)
"""Functions and methods of one tensor that round differently in vectors and alone."""


@named_in_packages("same_bits")
def in_blocks(x: Tensor) -> Tensor:
    """All elements in a row, with zeros behind them up to whole blocks of `VECTOR_BLOCK`."""
    flat = x.reshape(-1)
    missing = -flat.size(0) % 32  # VECTOR_BLOCK; TorchScript knows no module constants
    if missing == 0:
        return flat
    return torch.constant_pad_nd(flat, [0, missing])


@named_in_packages("same_bits")
def out_of_blocks(y: Tensor, x: Tensor) -> Tensor:
    """The elements of ``y`` that stand for those of ``x``, in the shape of ``x``."""
    return y[: x.numel()].view(x.size())


# Behind `sigmoid`, which does the same for outputs and leaves out the padding of both.
@Pass(name="whole_vectors", order=45, device="cpu")
def compute_whole_vectors(module: fx.GraphModule, _target: Target) -> None:
    """Let every one of `FUNCTIONS` take whole blocks, in place."""
    graph = module.graph
    for node in list(graph.nodes):
        x = node.args[0] if node.args else None
        known = seen(x)
        if node.target not in FUNCTIONS or known is None or not known.dtype.is_floating_point:
            continue
        assert isinstance(x, fx.Node)
        with graph.inserting_before(node):
            whole = graph.call_function(in_blocks, (x,))
        with graph.inserting_after(node):
            shaped = graph.call_function(out_of_blocks, (node, x))
        node.args = (whole, *node.args[1:])
        shaped.meta[SEEN] = node.meta[SEEN]
        node.replace_all_uses_with(shaped, lambda user, own=shaped: user is not own)
