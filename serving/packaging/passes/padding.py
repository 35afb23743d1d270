"""A sample's score has the same bits whoever shares its batch.

A server batches what happens to be waiting; without care the same request would get answers
that differ in the last bit from call to call.  Two parts of a forward pass look at the batch
size on the CPU.  Elementwise functions are the matter of `sigmoid` and `whole_vectors`; matrix products
take other kernels, with another order of summation, for the rows beyond the last multiple of `ROW_BLOCK`
(oneMKL) or for a single long row (oneDNN).  `pad_dense` and `pad_lengths` leave neither.

The price is the arithmetic of up to three more samples.  Found by measuring (x86, AVX-512 and
AVX2, torch 2.13); the tests hold it.  Where all matrix products are Tessera's, which compute each
row by itself, `remove_padding` takes the padding of the inputs away again.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from tessera.serving.packaging.dense_types import dense_operators
from tessera.serving.packaging.passes.registry import Pass, Target
from tessera.serving.packaging.stable_names import named_in_packages

ROW_BLOCK = 4
"""Rows that oneMKL's kernels take at a time."""


@named_in_packages("same_bits")
def pad_dense(dense: Tensor) -> Tensor:
    """Rows of zeros up to a multiple of `ROW_BLOCK` behind ``dense`` ``[B, F]``."""
    missing = -dense.size(0) % 4  # ROW_BLOCK; TorchScript knows no module constants
    if missing == 0:
        return dense
    return torch.constant_pad_nd(dense, [0, 0, 0, missing])


@named_in_packages("same_bits")
def pad_lengths(lengths: Tensor, dense: Tensor) -> Tensor:
    """Samples with empty bags up to a multiple of `ROW_BLOCK` behind the others.

    ``lengths`` are ``[F * B]`` feature-major, and so is the result; ``dense`` ``[B, ...]`` is not
    padded yet.
    """
    rows = dense.size(0)
    missing = -rows % 4  # ROW_BLOCK
    if missing == 0:
        return lengths
    return torch.constant_pad_nd(lengths.view(-1, rows), [0, missing]).view(-1)


@named_in_packages("same_bits")
def first_rows(output: Tensor, dense: Tensor) -> Tensor:
    """What an output ``[B rounded up, ...]`` has for the ``B`` samples of ``dense``."""
    return output[: dense.size(0)]


_PRODUCTS = frozenset(
    ["linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "einsum", "bilinear"]
)


@Pass(name="padding", order=50, backend="tessera", device="cpu")
def remove_padding(module: fx.GraphModule, _target: Target) -> None:
    """Drop the padding of inputs and outputs from a traced model without products of torch's own.

    Where there is one, nothing is changed.
    """
    graph = module.graph
    for node in graph.nodes:
        if node.op == "call_module":  # may hold anything
            return
        called = node.op in {"call_function", "call_method"}
        if called and node.target not in dense_operators():
            name = node.target if isinstance(node.target, str) else node.target.__name__
            if name in _PRODUCTS:
                return
    for pad in (pad_dense, pad_lengths, first_rows):
        for node in graph.find_nodes(op="call_function", target=pad):
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()
