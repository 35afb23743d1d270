"""The parts of a model that every rank holds whole: their gradients are averaged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

from tessera.training.distributed.comm.awaitable import LazyAwaitable
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.comm.replicas import replicas
from tessera.training.distributed.plan.sharded_module import ShardedModule


def sharded_parameter_names(module: nn.Module) -> set[str]:
    """The names of all parameters that sharded modules look after themselves."""
    return {
        name
        for path, part in module.named_modules()
        if isinstance(part, ShardedModule)
        for name in part.sharded_parameter_names(path)
    }


def _waited_for(output: Any) -> Any:
    """Return ``output`` after waiting for the results in it that are still being sent."""
    if not any(isinstance(leaf, LazyAwaitable) for leaf in _pytree.tree_leaves(output)):
        return output
    return _pytree.tree_map_only(LazyAwaitable, LazyAwaitable.wait, output)


class Wrapped(Protocol):
    """What a wrapper needs of a `DistributedModelParallel`: the model that it wraps, to replace."""

    _dmp_wrapped_module: nn.Module


class DataParallelWrapper(ABC):
    """Wraps the parts of a model that every rank holds whole."""

    @abstractmethod
    def wrap(self, dmp: Wrapped, env: ShardingEnv, device: torch.device) -> None:
        """Set ``dmp._dmp_wrapped_module`` to a wrapped form of itself."""


class DefaultDataParallelWrapper(DataParallelWrapper):
    """``DistributedDataParallel`` around everything but the sharded modules.

    Without a process group, and for a model without other parameters, nothing is wrapped.

    Args:
        bucket_cap_mb: MiB of gradients that travel together.
        static_graph: every step uses the same parameters in the same way.
        find_unused_parameters: look in every step for parameters that it did not use.
        allreduce_comm_precision: ``fp16`` or ``bf16``: what gradients travel as; None: as they
            are.

    Raises:
        ValueError: another precision.
    """

    def __init__(
        self,
        bucket_cap_mb: int = 25,
        static_graph: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        find_unused_parameters: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        allreduce_comm_precision: str | None = None,
    ) -> None:
        if allreduce_comm_precision not in {None, "fp16", "bf16"}:
            raise ValueError(
                f"allreduce_comm_precision is {allreduce_comm_precision!r}; give 'fp16', 'bf16' "
                "or None"
            )
        self._bucket_cap_mb = bucket_cap_mb
        self._static_graph = static_graph
        self._find_unused_parameters = find_unused_parameters
        self._precision = allreduce_comm_precision

    def wrap(self, dmp: Wrapped, env: ShardingEnv, device: torch.device) -> None:
        """Wrap the model.

        Raises:
            ValueError: it is wrapped already, or its gradients cannot travel as wanted.
        """
        if self._precision == "bf16" and device.type == "cpu":
            raise ValueError(
                "allreduce_comm_precision is 'bf16', which travels between GPUs; give 'fp16' or "
                "None on a CPU"
            )
        model = dmp._dmp_wrapped_module  # noqa: SLF001 - the wrapper's side of the contract
        if isinstance(model, DistributedDataParallel):
            raise ValueError(  # noqa: TRY004 - the state is wrong, not an argument's type
                "the model is in a DistributedDataParallel already; wrap it once"
            )
        sharded = sharded_parameter_names(model)
        left = [name for name, _ in model.named_parameters() if name not in sharded]
        if env.process_group is None or not left:
            return
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call] # noqa: SLF001 - torch's only way to leave parameters out, and untyped
            model, list(sharded)
        )
        # DDP looks for tensors in the output. A result that is still being sent is not a tensor, and
        # the first step of a static graph would average nothing.
        model.register_forward_hook(lambda _module, _args, output: _waited_for(output))
        wrapped = replicas(
            model.to(device),
            env.process_group,
            device,
            static_graph=self._static_graph,
            find_unused_parameters=self._find_unused_parameters,
            bucket_cap_mb=self._bucket_cap_mb,
        )
        if self._precision is not None:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: PLC0415 - few need it

            hook = getattr(default_hooks, f"{self._precision}_compress_hook")
            wrapped.register_comm_hook(None, hook)
        dmp._dmp_wrapped_module = wrapped  # noqa: SLF001 - the wrapper's side of the contract
