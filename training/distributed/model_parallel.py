"""DistributedModelParallel: the wrapper that fuses a model's tables with their optimizer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from tessera.training.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from tessera.training.distributed.types import (
    ModuleSharder,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
)
from tessera.training.optim.keyed import CombinedOptimizer, KeyedOptimizer


class DataParallelWrapper(Protocol):
    """Wraps the parts of a model that every rank holds whole."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Set ``dmp._dmp_wrapped_module`` to a wrapped ``dmp.module``."""


class DistributedModelParallel(nn.Module):
    """A model whose embedding collections are replaced, in place, by their fused form.

    State dicts and parameter names are those of the model without the wrapper.  The dense
    parameters are left for an optimizer of the user's
    (`tessera.training.optim.optimizers.in_backward_optimizer_filter`).

    Args:
        module: the model; it is changed, and parts of it may be on the ``meta`` device.
        env: who takes part; None: this process alone (or what ``WORLD_SIZE`` says).
        device: where the dense part is computed; None: the CPU.
        plan: where tables live; None: all here.  Collections that a plan leaves out stay plain.
        sharders: one per type of module; None: `EmbeddingBagCollectionSharder` with row-wise
            Adagrad.
        init_data_parallel: whether to call ``data_parallel_wrapper`` now; otherwise call
            `init_data_parallel` before the first step.
        init_parameters: whether parts on the ``meta`` device get memory and first values.
        data_parallel_wrapper: what wraps the dense part; None: with one rank, nothing.

    Raises:
        ValueError: more than one rank, or a plan that does not fit the model.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
        plan: ShardingPlan | None = None,
        sharders: list[ModuleSharder] | None = None,
        init_data_parallel: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        init_parameters: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        data_parallel_wrapper: DataParallelWrapper | None = None,
    ) -> None:
        super().__init__()
        self._env = env or ShardingEnv.from_local(int(os.environ.get("WORLD_SIZE", "1")), 0)
        if self._env.world_size > 1:
            raise ValueError(
                f"world_size is {self._env.world_size}; tables are trained on one rank, so start "
                "one process"
            )
        self.device = device or torch.device("cpu")
        self._sharders = {
            sharder.module_type: sharder
            for sharder in sharders or [EmbeddingBagCollectionSharder()]
        }
        self._plan = plan or self._default_plan(module)
        self._check_plan(module)
        self._data_parallel_wrapper = data_parallel_wrapper
        self._data_parallel_done = False
        self._dmp_wrapped_module = self._shard(module)
        self._fused_optimizer = self._combine_fused_optimizers()
        if init_parameters:
            self._init_parameters()
        if init_data_parallel:
            self.init_data_parallel()

    def _shardable(self, module: nn.Module) -> Iterator[tuple[str, nn.Module, ModuleSharder]]:
        for path, part in module.named_modules():
            sharder = self._sharders.get(type(part))
            if sharder is not None:
                yield path, part, sharder

    def _default_plan(self, module: nn.Module) -> ShardingPlan:
        return ShardingPlan(
            {
                path: {table: ParameterSharding() for table in sharder.shardable_parameters(part)}
                for path, part, sharder in self._shardable(module)
            }
        )

    def _check_plan(self, module: nn.Module) -> None:
        paths = {path for path, _, _ in self._shardable(module)}
        unknown = sorted(set(self._plan.plan) - paths)
        if unknown:
            raise ValueError(
                f"the plan names module {unknown[0]!r}; the model's shardable modules are "
                f"{sorted(paths)}"
            )

    def _shard(self, module: nn.Module) -> nn.Module:
        for path, part, sharder in list(self._shardable(module)):
            params = self._plan.get_plan_for_module(path)
            if params is None:
                continue
            sharded = sharder.shard(part, params, self._env, self.device)
            if not path:
                return sharded
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, sharded)
        return module

    def _init_parameters(self) -> None:
        for part in self._dmp_wrapped_module.modules():
            own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
            if any(tensor.is_meta for tensor in own):
                reset = getattr(part, "reset_parameters", None)
                if reset is None:
                    raise ValueError(
                        f"{type(part).__name__} is on the meta device and has no "
                        "reset_parameters(); build it on a real device"
                    )
                part.to_empty(device=self.device, recurse=False)
                reset()

    def init_data_parallel(self) -> None:
        """Let ``data_parallel_wrapper`` wrap the dense part, once."""
        if self._data_parallel_wrapper is not None and not self._data_parallel_done:
            self._data_parallel_wrapper.wrap(self, self._env, self.device)
            self._data_parallel_done = True

    @property
    def module(self) -> nn.Module:
        """The model, with its collections in fused form."""
        return self._dmp_wrapped_module

    @property
    def plan(self) -> ShardingPlan:
        """Where the tables live."""
        return self._plan

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer of all fused tables, by their names in the model.

        Raises:
            ValueError: the model has no fused tables.
        """
        if self._fused_optimizer is None:
            raise ValueError("the model has no fused tables")
        return self._fused_optimizer

    def _combine_fused_optimizers(self) -> KeyedOptimizer | None:
        parts: list[KeyedOptimizer | tuple[str, KeyedOptimizer]] = [
            (path, part.fused_optimizer)
            for path, part in self._dmp_wrapped_module.named_modules()
            if isinstance(part, ShardedEmbeddingBagCollection)
        ]
        return CombinedOptimizer(parts) if parts else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self._dmp_wrapped_module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override] # torch has overloads for positional use
        """The model's state dict, tables under the plain collection's names; not copies."""
        return self._dmp_wrapped_module.state_dict(*args, **kwargs)

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,  # noqa: FBT001, FBT002 - torch's signature
        assign: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> Any:
        """Copy a state dict into the model.

        Raises:
            ValueError: ``assign``: the tables' memory belongs to the fused operator.
            RuntimeError: torch's, for names or shapes that do not fit.
        """
        if assign:
            raise ValueError("assign is True; fused tables are filled in place, so give False")
        return self._dmp_wrapped_module.load_state_dict(state_dict, strict=strict)

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,  # noqa: FBT001, FBT002 - torch's signature
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002 - torch's signature
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters, fused tables included."""
        return self._dmp_wrapped_module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self,
        prefix: str = "",
        recurse: bool = True,  # noqa: FBT001, FBT002 - torch's signature
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002 - torch's signature
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's buffers."""
        return self._dmp_wrapped_module.named_buffers(prefix, recurse, remove_duplicate)


def get_module(module: nn.Module) -> nn.Module:
    """The model inside a `DistributedModelParallel`, or ``module`` itself."""
    return module.module if isinstance(module, DistributedModelParallel) else module
