"""The parts of a model whose gradients ranks average in the backward pass."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def replicated_parts(model: nn.Module) -> list[DistributedDataParallel]:
    """Every ``DistributedDataParallel`` of a model, those of data-parallel tables among them.

    Sharded modules keep their lookups in a list, so that a table has one name in the model.
    """
    found: dict[int, DistributedDataParallel] = {}
    for module in model.modules():
        for part in (module, *getattr(module, "_lookups", ())):
            if isinstance(part, DistributedDataParallel):
                found[id(part)] = part
    return list(found.values())
