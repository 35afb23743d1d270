"""The served graph's second method: features that many samples share are looked up once.

A ranking request of one user and many candidates repeats the user's ids for each of them.
`SHARED_METHOD` takes those features once per user instead: of the graph that `forward` is, every
pooled lookup is replaced by one that looks a shared bag up once and copies its vector to the samples,
and nothing else changes, so a sample's score has the same bits by either way.

That holds where the ids of the ``id_list`` features go into pooled lookups and nowhere else.  A graph
that does something of its own with their lengths (unpooled vectors, padding, a count of ids, rows of
several shards put together) has no such method, and its servers repeat the ids.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.graph_module import _method_from_src

from tessera.serving.package.runner import SHARED_METHOD
from tessera.serving.packaging.lookups.shard_parts import beside
from tessera.serving.packaging.passes.registry import Pass, Target

# A lookup's arguments by place: weights, plan, ids, lengths, width, factors of the ids.
_IDS, _LENGTHS, _WIDTH, _FACTORS = 2, 3, 4, 5


# Behind all others: it copies the graph.
@Pass(name="shared_rows", order=90, device="cpu")
def add_shared_method(module: fx.GraphModule, _target: Target) -> None:
    """Give a traced module, just before it is scripted, the second method if it can have it."""
    graph = _shared_graph(module.graph)
    if graph is None:
        return
    code = graph.python_code("self")
    source = code.src.replace("def forward(", f"def {SHARED_METHOD}(", 1)
    method = _method_from_src(SHARED_METHOD, source, code.globals)
    # Of the class, which fx makes for each module: TorchScript looks for exported methods there.
    setattr(type(module), SHARED_METHOD, torch.jit.export(method))


def _shared_graph(graph: fx.Graph) -> fx.Graph | None:
    """A copy of ``graph`` with two more inputs; None where its ids go elsewhere than to lookups."""
    if not hasattr(torch.ops.tessera, "lookup_partly_shared"):
        return None  # the operators are not loaded, so the graph has none of them
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    inputs = copy.find_nodes(op="placeholder")
    lookups = _lookups(copy, {str(node.target): node for node in inputs})
    if not lookups:
        return None
    with copy.inserting_after(inputs[-1]):
        shared = copy.placeholder("id_list_features_shared")
    with copy.inserting_after(shared):
        row_index = copy.placeholder("shared_row_index")
    for node in lookups:
        tables, plan, ids, lengths, width, *factors = node.args
        with copy.inserting_before(node):
            new = copy.call_function(
                torch.ops.tessera.lookup_partly_shared,
                (tables, plan, ids, lengths, shared, row_index, width, *factors),
            )
        node.replace_all_uses_with(new)
        copy.erase_node(node)
    copy.lint()
    return copy


def _lookups(graph: fx.Graph, inputs: dict[str, fx.Node]) -> list[fx.Node]:
    """The lookups of ``id_list`` features; empty where these go elsewhere, too."""
    names = ("id_list_features_lengths", "id_list_features_values")
    if not inputs.keys() >= set(names):
        return []  # no package's forward
    # What holds the bags' lengths, and what has a number for each of their ids.
    lengths, per_id = ({inputs[name]} for name in names)
    found = []
    for node in graph.nodes:
        used = {n for n in node.all_input_nodes if n in lengths or n in per_id}
        if not used:
            continue
        if node.target is torch.ops.tessera.lookup:
            if not _is_plain(node, lengths, per_id):
                return []
            found.append(node)
        elif used == {first := _first(node)}:
            if first in per_id:
                per_id.add(node)
            elif node.target in {beside, torch.cat}:
                lengths.add(node)
            else:
                return []
        elif node.target is not beside or first in used:
            return []  # beside otherwise asks them for their device alone
    return found


def _first(node: fx.Node) -> fx.Node | None:
    """The input that a node hands on: elsewhere, as another type, or with others behind it."""
    if node.target in {beside, torch.ones_like, "long"}:
        first = node.args[0]
    elif node.target is torch.cat and len(node.args) == 1 and not node.kwargs:
        # The id_score_list features come behind the id_list ones.
        parts = node.args[0]
        assert isinstance(parts, list | tuple)
        first = parts[0]
    else:
        return None
    assert isinstance(first, fx.Node)
    return first


def _is_plain(node: fx.Node, lengths: set[fx.Node], per_id: set[fx.Node]) -> bool:
    """Whether a lookup takes ids, lengths and factors as they were given, and no more than that."""
    factors = node.args[_FACTORS] if len(node.args) > _FACTORS else None
    return (
        _WIDTH < len(node.args) <= _FACTORS + 1
        and node.kwargs.keys() <= {"launch"}
        and node.args[_IDS] in per_id
        and node.args[_LENGTHS] in lengths
        and (factors is None or factors in per_id)
    )
