"""Find the dense layers of a traced graph and put others in their place."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, fx, nn

from tessera.serving.packaging.passes.tensors import replace, seen

RELUS = (torch.relu, nn.functional.relu, "relu", "relu_")
"""What a ReLU can be in a traced graph; one that works in place must be its input's only user."""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A linear function of fixed float32 weights ``[out, in]`` and a bias ``[out]`` or None.

    ``key`` says which tensors these are: it is equal for two calls of one layer.  ``dimensions`` and
    ``contiguous_rows`` are its input's.
    """

    weight: Tensor
    bias: Tensor | None
    key: tuple[int, int]
    dimensions: int
    contiguous_rows: bool

    @property
    def of_matrix(self) -> bool:
        """Whether its input is ``[B, in]``."""
        return self.dimensions == 2

    @property
    def of_vector(self) -> bool:
        """Whether its input is ``[in]``."""
        return self.dimensions < 2


class Call(Protocol):
    """Inserts what computes a linear function, and the ReLU behind it if ``relu``.

    Returns None where the function is to stay as it is.
    """

    def __call__(self, name: str, x: fx.Node, linear: Linear, *, relu: bool) -> fx.Node | None:
        """``name`` is a free name; ``x`` is the function's input."""
        ...


def replace_linears(module: fx.GraphModule, call: Call) -> None:
    """Put what ``call`` inserts in the place of each linear function and of the ReLU behind it.

    The tensors of ``module`` were observed.  Functions whose weights are computed, or are not
    float32, are left as they are.
    """
    graph = module.graph
    nodes = graph.find_nodes(op="call_function", target=nn.functional.linear)
    for number, node in enumerate(nodes):
        linear = _linear(module, node)
        if linear is None:
            continue
        relu = _only_relu(node)
        with graph.inserting_before(node):
            x, _, _ = linear_arguments(node)
            new = call(f"linear_{number}", x, linear, relu=relu is not None)
        if new is not None:
            replace(relu or node, new)
    graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    module.recompile()


def linear_arguments(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """Input, weight and bias of a call of `torch.nn.functional.linear`."""
    given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    assert bias is None or isinstance(bias, fx.Node)
    return x, weight, bias


def parameter(module: fx.GraphModule, node: fx.Node) -> Tensor | None:
    """The tensor of the module that ``node`` reads; None where it is computed."""
    if node.op != "get_attr":
        return None
    found = operator.attrgetter(str(node.target))(module)
    assert isinstance(found, Tensor)
    return found.detach()


def _linear(module: fx.GraphModule, node: fx.Node) -> Linear | None:
    x, weight, bias = linear_arguments(node)
    fixed = parameter(module, weight), None if bias is None else parameter(module, bias)
    known = seen(x)
    if fixed[0] is None or (bias is not None and fixed[1] is None) or known is None:
        return None
    if {known.dtype, fixed[0].dtype} != {torch.float32}:
        return None
    return Linear(
        weight=fixed[0],
        bias=fixed[1],
        key=(fixed[0].data_ptr(), 0 if fixed[1] is None else fixed[1].data_ptr()),
        dimensions=len(known.shape),
        contiguous_rows=known.contiguous_rows,
    )


def _only_relu(node: fx.Node) -> fx.Node | None:
    """The ReLU that is the only user of ``node``, if so."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target in RELUS else None
