"""Small functions under the path of ``torchrec.distributed.utils``."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import nn

from tessera.training.distributed.model.shard import init_parameters
from tessera.training.optim.apply_optimizer_in_backward import optimizer_type_to_emb_opt_type

__all__ = [
    "add_prefix_to_state_dict",
    "append_prefix",
    "copy_to_device",
    "filter_state_dict",
    "init_parameters",
    "none_throws",
    "optimizer_type_to_emb_opt_type",
]

T = TypeVar("T")
Module = TypeVar("Module", bound=nn.Module)


def none_throws(optional: T | None, message: str = "Unexpected `None`") -> T:
    """The value.

    Raises:
        AssertionError: it is None; the text is ``message``.
    """
    if optional is None:
        raise AssertionError(message)
    return optional


def append_prefix(prefix: str, name: str) -> str:
    """``prefix.name``, or the one that is not empty."""
    return f"{prefix}.{name}" if prefix and name else prefix + name


def filter_state_dict(state_dict: Mapping[str, T], name: str) -> OrderedDict[str, T]:
    """The entries below ``name.``, without it."""
    return OrderedDict(
        (key.removeprefix(f"{name}."), value)
        for key, value in state_dict.items()
        if key.startswith(f"{name}.")
    )


def add_prefix_to_state_dict(state_dict: dict[str, T], prefix: str) -> None:
    """Put ``prefix`` before every key, in place and in order."""
    entries = list(state_dict.items())
    state_dict.clear()
    state_dict.update((f"{prefix}{key}", value) for key, value in entries)


def copy_to_device(module: Module, current_device: torch.device, to_device: torch.device) -> Module:
    """A copy of the module whose tensors of one device are on another; those of other devices are shared.

    Args:
        module: stays as it is.
        current_device: of the tensors that are copied.
        to_device: where the copies are.
    """
    memo = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.device == current_device:
            moved = tensor.detach().to(to_device)
            if isinstance(tensor, nn.Parameter):
                moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = moved
        else:
            memo[id(tensor)] = tensor
    return copy.deepcopy(module, memo)
