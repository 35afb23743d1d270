"""Small functions under the path of ``torchrec.distributed.utils``."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from tessera.training.distributed.plan.first_values import init_parameters
from tessera.training.distributed.plan.plan_types import ParameterSharding
from tessera.training.distributed.sharding.creation import placement_params
from tessera.training.modules.embedding_configs import DataType
from tessera.training.optim.apply_optimizer_in_backward import optimizer_type_to_emb_opt_type

__all__ = [
    "CopyableMixin",
    "add_params_from_parameter_sharding",
    "add_prefix_to_state_dict",
    "append_prefix",
    "convert_to_fbgemm_types",
    "copy_to_device",
    "filter_state_dict",
    "init_parameters",
    "merge_fused_params",
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


class CopyableMixin(nn.Module):
    """Base of modules that a sharded model on the CPU copies to a device as a whole."""

    def copy(self, device: torch.device) -> nn.Module:
        """A copy whose tensors that are on the CPU here are on ``device``."""
        return copy_to_device(self, torch.device("cpu"), device)


def merge_fused_params(
    fused_params: Mapping[str, Any] | None = None,
    param_fused_params: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The settings of one table's kernel: those of all tables, and over them the table's own.

    Args:
        fused_params: of all tables; stays as it is.
        param_fused_params: of the table; ``lr`` is another word for ``learning_rate``.
    """
    own = dict(param_fused_params or {})
    if "lr" in own:
        own["learning_rate"] = own.pop("lr")
    return copy.deepcopy(dict(fused_params or {})) | own


def add_params_from_parameter_sharding(
    fused_params: dict[str, Any] | None, parameter_sharding: ParameterSharding
) -> dict[str, Any]:
    """Put what a table's placement says of its kernel over the settings of all tables.

    Args:
        fused_params: changed in place and returned; None: a new dictionary.
        parameter_sharding: the placement.
    """
    params = {} if fused_params is None else fused_params
    params.update(placement_params(parameter_sharding))
    return params


def convert_to_fbgemm_types(fused_params: dict[str, Any]) -> dict[str, Any]:
    """Replace each `DataType` by FBGEMM's ``SparseType``, in place; returns the dictionary.

    Raises:
        ImportError: FBGEMM is not installed.
    """
    for name in ("cache_precision", "weights_precision", "output_dtype"):
        if isinstance(fused_params.get(name), DataType):
            # FBGEMM takes seconds to import and is asked for by name only here.
            from fbgemm_gpu.split_embedding_configs import SparseType  # noqa: PLC0415

            fused_params[name] = SparseType[fused_params[name].value]
    return fused_params
