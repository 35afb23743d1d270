"""Let lookups give bfloat16 where only layers in bfloat16 read them, beside the dense vector.

A pooled vector is summed in float32 and rounded once, which gives what rounding the float32 vector
gives.
"""

from __future__ import annotations

from dataclasses import replace as changed
from typing import Any

import torch
from torch import fx

from tessera.kernels.plan import plan_column
from tessera.serving.packaging.passes.linears import parameter
from tessera.serving.packaging.passes.narrow import NARROW, is_cast, keep_narrow, merge_casts
from tessera.serving.packaging.passes.registry import Pass, Target
from tessera.serving.packaging.passes.tensors import SEEN, replace, seen

ALIGNED = 8
"""Columns of 16 bytes: a lookup stores vectors that begin elsewhere in smaller pieces."""

_WIDTH = 4  # the argument of `lookup` with this number


@Pass(name="narrow_rows", order=35, device="cuda", dense_dtype=("bf16", "fp8"))
def narrow_rows(module: fx.GraphModule, _target: Target) -> None:
    """Round before a concatenation or by the lookup instead of behind it, in place.

    A lookup that stands behind one other tensor in a concatenation copies that to its place, so that
    nothing is concatenated.
    """
    graph = module.graph
    merge_casts(module)
    cats = graph.find_nodes(op="call_function", target=torch.cat)
    joined = [_round_parts(graph, cat) for cat in reversed(cats) if _is_rounded(cat)]
    merge_casts(module)
    keep_narrow(module)
    for number, node in enumerate(_lookups(graph)):
        cast = _cast_of(node)
        if cast is None:
            continue
        node.kwargs = {**node.kwargs, "dtype": NARROW}
        cast.replace_all_uses_with(node)
        graph.eliminate_dead_code()
        for cat in joined:
            _join(module, cat, node, f"plan_{number}_behind_dense")
    graph.eliminate_dead_code()


def _lookups(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=torch.ops.tessera.lookup))


def _is_rounded(node: fx.Node) -> bool:
    """Whether it is float32 and every reader rounds it."""
    known = seen(node)
    is_float = known is not None and known.dtype == torch.float32
    return is_float and len(node.users) > 0 and all(is_cast(user, NARROW) for user in node.users)


def _round_parts(graph: fx.Graph, cat: fx.Node) -> fx.Node:
    """Insert the concatenation of rounded parts, whose readers then read that."""
    parts: Any = cat.args[0]
    with graph.inserting_before(cat):
        rounded = [graph.call_method("to", (part, NARROW)) for part in parts]
        joined = graph.call_function(torch.cat, (rounded, *cat.args[1:]), dict(cat.kwargs))
    known = seen(cat)
    assert known is not None
    joined.meta[SEEN] = changed(known, dtype=NARROW)
    for cast in list(cat.users):
        cast.replace_all_uses_with(joined)
    graph.eliminate_dead_code()
    return joined


def _cast_of(node: fx.Node) -> fx.Node | None:
    """The only reader of a lookup, where that rounds it; a flattened matrix is the matrix."""
    users = list(node.users)
    while len(users) == 1 and _is_same_matrix(users[0]):
        users = list(users[0].users)
    return users[0] if len(users) == 1 and is_cast(users[0], NARROW) else None


def _is_same_matrix(node: fx.Node) -> bool:
    known = seen(node.args[0]) if node.args else None
    flat = (node.op, node.target, node.args[1:]) == ("call_method", "flatten", (1,))
    return flat and known is not None and len(known.shape) == 2


def _join(module: fx.GraphModule, cat: fx.Node, lookup: fx.Node, name: str) -> None:
    """Let the lookup also write what stands before it in ``cat``, if that can be.

    ``name`` is free, for a plan whose columns begin behind it.
    """
    parts: Any = cat.args[0]
    known = seen(cat)
    dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    width: Any = lookup.args[_WIDTH]
    if len(parts) != 2 or parts[1] is not lookup or len(lookup.users) != 1:
        return
    if known is None or len(known.shape) != 2 or dim not in {1, -1}:
        return
    before = known.shape[1] - width
    plan_node: Any = lookup.args[1]
    plan = parameter(module, plan_node)
    if plan is None or before % ALIGNED or width % ALIGNED or "dense" in lookup.kwargs:
        return
    moved = plan.clone()
    moved[:, plan_column("out_column")] += before
    module.register_buffer(name, moved)
    graph = module.graph
    with graph.inserting_before(cat):
        arguments = list(lookup.args)
        arguments[1] = graph.get_attr(name)
        arguments[_WIDTH] = width + before
        options = {**lookup.kwargs, "dense": parts[0]}
        replace(cat, graph.call_function(lookup.target, tuple(arguments), options))
    graph.erase_node(cat)
    graph.erase_node(lookup)  # which counts ids, so that it does not look dead
