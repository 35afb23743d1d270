"""A module that every rank holds whole: its gradients are averaged."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# torch 2.13 gave the option another name.
_KEEP_BUFFERS: dict[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else {"broadcast_buffers": False}
)


def replicas(
    module: nn.Module, pg: dist.ProcessGroup, device: torch.device, **options: Any
) -> DistributedDataParallel:
    """``module``, on ``device``, whose gradients are averaged; buffers are left to each rank."""
    return DistributedDataParallel(
        module,
        device_ids=None if device.type == "cpu" else [device],
        process_group=pg,
        gradient_as_bucket_view=True,
        **_KEEP_BUFFERS,
        **options,
    )
