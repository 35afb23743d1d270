"""DLRM's dot interaction as one operator on a CPU: no stacking, no square product, no gather."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tessera.serving.packaging.passes.linears import parameter
from tessera.serving.packaging.passes.registry import Pass, Target
from tessera.serving.packaging.passes.tensors import replace, seen


@Pass(name="dot_interaction", order=10, backend="tessera", device="cpu")
def fuse_interactions(module: fx.GraphModule, _target: Target) -> None:
    """Replace what `tessera.training.models.dlrm.InteractionArch` computes by one operator, in place.

    That is, for ``x`` ``[B, D]`` and ``y`` ``[B, F, D]``, ``x`` followed by the products of every pair
    of the ``F + 1`` vectors below the diagonal, row by row; whoever wrote it.
    """
    graph = module.graph
    for gather in graph.find_nodes(op="call_method", target="index_select"):
        try:
            end, flat, x, y = _interaction(module, gather)
        except _OtherGraphError:
            continue
        # The node that flattened the products flattens ``y`` now.
        flat.args = (y, 1)
        with graph.inserting_before(end):
            replace(end, graph.call_function(torch.ops.tessera.dot_interaction, (x, flat)))
    graph.eliminate_dead_code()


class _OtherGraphError(Exception):
    """What is looked at is not the interaction."""


def _interaction(
    module: fx.GraphModule, gather: fx.Node
) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node]:
    """The last node, the one that flattens the products, ``x`` and ``y``.

    Raises:
        _OtherGraphError: ``gather`` is something else than the choice of the products.
    """
    flat, dim, pairs = _nodes(gather, 3)
    (end,) = _expected(list(gather.users), 1)
    _expect(dim == 1 and _is(flat, "flatten", 1) and len(flat.users) == 1)
    product = flat.args[0]
    _expect(isinstance(product, fx.Node) and product.target is torch.bmm)
    vectors, turned = _nodes(product, 2)
    _expect(_is(turned, "transpose", 1, 2) and turned.args[0] is vectors)
    first, y = _expected(_joined(vectors), 2)
    x, last = _expected(_joined(end), 2)
    _expect(last is gather and _is(first, "unsqueeze", 1) and first.args[0] is x)
    known, chosen = seen(vectors), parameter(module, pairs)
    _expect(known is not None and known.dtype == torch.float32 and chosen is not None)
    assert known is not None
    assert chosen is not None
    count = known.shape[1]
    lower = torch.tril_indices(count, count, offset=-1)
    _expect(torch.equal(chosen, lower[0] * count + lower[1]))
    return end, flat, x, y


def _expect(condition: object) -> None:
    if not condition:
        raise _OtherGraphError


def _nodes(node: Any, count: int) -> Any:
    return _expected(list(node.args), count)


def _expected(found: list[Any], count: int) -> list[Any]:
    _expect(len(found) == count)
    return found


def _is(node: object, method: str, *arguments: int) -> bool:
    return (
        isinstance(node, fx.Node)
        and (node.op, node.target, node.args[1:]) == ("call_method", method, arguments)
        and not node.kwargs
    )


def _joined(node: object) -> list[fx.Node]:
    """What a node puts side by side along dimension 1; empty for other nodes."""
    if not isinstance(node, fx.Node) or node.target is not torch.cat:
        return []
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    parts = node.args[0]
    if dim != 1 or not isinstance(parts, list | tuple):
        return []
    return [part for part in parts if isinstance(part, fx.Node)]
