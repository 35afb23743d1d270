"""What the sparse types do outside of TorchScript: print, cross streams, enter a traced graph.

TorchScript compiles only the methods that a class defines itself.  So what it cannot or need not
know lives in the base class `OutsideScript`, and a base class whose methods it must know is marked
``shared=True``: each of the sparse types then gets them as its own.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.proxy import TracerBase

from tessera.training.sparse.text import text_of
from tessera.training.streamable import Pipelineable


class OutsideScript(Pipelineable):
    """Base of the sparse types, whose field ``_x`` is the constructor's argument ``x``.

    Attributes:
        _worked_out: arguments that follow from the others, and are left out of a graph's node.
    """

    _worked_out: ClassVar[frozenset[str]] = frozenset()
    _shared: ClassVar[bool] = False

    def __init_subclass__(cls, *, shared: bool = False) -> None:
        super().__init_subclass__()
        cls._shared = shared
        if shared:
            return
        for base in cls.__mro__[1:]:
            if vars(base).get("_shared"):
                for name, method in vars(base).items():
                    if inspect.isfunction(method) and name not in vars(cls):
                        setattr(cls, name, method)

    def _arguments(self) -> dict[str, Any]:
        return {
            name: value
            for field, value in vars(self).items()
            if value is not None and (name := field[1:]) not in self._worked_out
        }

    def size_in_bytes(self) -> int:
        """Return the number of bytes of all tensors of this object."""
        fields = (field for field in vars(self).values() if isinstance(field, Tensor))
        return sum(field.numel() * field.element_size() for field in fields)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of all tensors until ``stream`` has done what it has been given."""
        for field in vars(self).values():
            if isinstance(field, Tensor):
                field.record_stream(stream)

    def __str__(self) -> str:
        return text_of(self)

    __repr__ = __str__

    def __fx_create_arg__(self, tracer: TracerBase) -> Node:
        """The node that builds this object in a traced graph.

        An object that was built from proxies inside a traced model needs none: its methods run
        while the model is traced, and the graph holds what they did to the tensors.  Only where
        the object itself leaves the traced code (an output, an argument of a leaf) does the
        graph have to build it.
        """
        kwargs = {name: tracer.create_arg(value) for name, value in self._arguments().items()}
        return tracer.create_node("call_function", type(self), (), kwargs, type_expr=type(self))
