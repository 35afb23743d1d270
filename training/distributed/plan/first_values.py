"""First values of the parts of a model that were made on the ``meta`` device."""

from __future__ import annotations

import torch
from torch import nn

from tessera.errors import UserError
from tessera.training.distributed.plan.sharded_module import ShardedModule


def init_parameters(module: nn.Module, device: torch.device) -> bool:
    """Give the parts of ``module`` on the ``meta`` device memory on ``device`` and first values.

    Returns:
        Whether anything was on the ``meta`` device.

    Raises:
        UserError: a part has no ``reset_parameters()`` that could fill it.
    """
    if isinstance(module, ShardedModule):
        return False  # it has begun with values of its own
    # Children first: a collection knows better than its nn.Embeddings how they begin.
    changed = [init_parameters(child, device) for child in module.children()]
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    is_meta = any(tensor.is_meta for tensor in own)
    reset = getattr(module, "reset_parameters", None)
    if is_meta:
        if reset is None:
            raise UserError(
                f"{type(module).__name__} is on the meta device and has no reset_parameters(); "
                "build it on a real device"
            )
        module.to_empty(device=device, recurse=False)
    if reset is not None and (is_meta or any(changed)):
        reset()
    return is_meta or any(changed)
