"""What the tensors of a traced graph look like, seen while it runs once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

SEEN = "tensor"
"""The key of `Seen` in a node's ``meta``."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A node's tensor for some batch; for another, its sizes beyond the first two may be others.

    ``contiguous_rows`` says whether the elements of its last dimension follow each other in memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    contiguous_rows: bool


class _Observer(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        if isinstance(found, Tensor):
            n.meta[SEEN] = Seen(
                shape=tuple(found.shape),
                dtype=found.dtype,
                contiguous_rows=found.dim() > 0 and found.stride(-1) == 1,
            )
        return found


def observe(module: fx.GraphModule, *arguments: Tensor) -> Any:
    """Run a traced module once and note at each node what it gives; returns the result."""
    with torch.inference_mode():
        return _Observer(module).run(*arguments)


def seen(node: object) -> Seen | None:
    """What was seen of a node's tensor, if anything."""
    found = node.meta.get(SEEN) if isinstance(node, fx.Node) else None
    return found if isinstance(found, Seen) else None


def replace(node: fx.Node, new: fx.Node) -> None:
    """Put ``new`` in the place of ``node``, for all who use it; it gives the same tensor."""
    if SEEN in node.meta:
        new.meta[SEEN] = node.meta[SEEN]
    node.replace_all_uses_with(new)
