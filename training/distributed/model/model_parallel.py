"""DistributedModelParallel: a model whose tables are spread over ranks, the rest replicated."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tessera.errors import UserError, unknown_name
from tessera.training.distributed.comm.environment import (
    ShardingEnv,
    default_env,
    without_group,
)
from tessera.training.distributed.model.data_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
)
from tessera.training.distributed.model.shard import made_plan, shard_parts
from tessera.training.distributed.plan.first_values import init_parameters as init_parts
from tessera.training.distributed.plan.plan_types import (
    EmbeddingModuleShardingPlan,
    ShardingPlan,
)
from tessera.training.distributed.plan.sharded_module import (
    ModuleSharder,
    ShardedModule,
    outermost,
)
from tessera.training.distributed.planner.generators import get_default_sharders
from tessera.training.optim.fused import FusedOptimizerModule
from tessera.training.optim.keyed import CombinedOptimizer, KeyedOptimizer

if TYPE_CHECKING:
    from tessera.training.distributed.model_tracker.model_delta_tracker import ModelDeltaTracker
    from tessera.training.distributed.model_tracker.types import DeltaTrackerConfig


class DistributedModelParallel(nn.Module, FusedOptimizerModule):
    """A model whose collections are replaced, in place, by their sharded form.

    State dicts and parameter names are those of the model without the wrapper.  The parameters
    that the backward pass does not update are left for an optimizer of the user's
    (`tessera.training.optim.optimizers.in_backward_optimizer_filter`).

    Args:
        module: the model; it is changed, and parts of it may be on the ``meta`` device.
        env: who takes part; None: the default process group, or this process alone.
        device: where this rank computes; None: the CPU.
        plan: where tables live; None: what `EmbeddingShardingPlanner.collective_plan` says, with
            one rank all here.  Collections that a plan leaves out stay plain.
        sharders: one per type of module; None: the default ones.
        init_data_parallel: whether the rest is wrapped now; otherwise call
            `init_data_parallel` before the first step.
        init_parameters: whether parts on the ``meta`` device get memory and first values.
        data_parallel_wrapper: what wraps the rest; None: `DefaultDataParallelWrapper`.

    Attributes:
        plan: on which ranks the tables are.

    Raises:
        UserError: several ranks without a process group, or a plan that does not fit the model.
        PlannerError: there is no plan.
    """

    plan: ShardingPlan

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
        plan: ShardingPlan | None = None,
        sharders: list[ModuleSharder[Any]] | None = None,
        init_data_parallel: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        init_parameters: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        data_parallel_wrapper: DataParallelWrapper | None = None,
    ) -> None:
        super().__init__()
        self._env = env or default_env()
        if self._env.world_size > 1 and self._env.process_group is None:
            raise without_group(self._env.world_size)
        self.device = device or torch.device("cpu")
        if self.device.type == "meta":
            raise UserError(
                "device is meta; the model may be there, its tables are trained on cpu or cuda"
            )
        sharders = sharders or get_default_sharders()
        self.plan = plan or made_plan(module, self._env, self.device, sharders)
        self._data_parallel_wrapper = data_parallel_wrapper or DefaultDataParallelWrapper()
        self._data_parallel_done = False
        self._delta_tracker: ModelDeltaTracker | None = None
        self._sharders = {sharder.module_type: sharder for sharder in sharders}
        self._dmp_wrapped_module = self._sharded(module, sharders)
        fused = self._fused_parts()
        self._fused_optimizer = CombinedOptimizer(fused) if fused else None
        if init_parameters:
            init_parts(self._dmp_wrapped_module, self.device)
        if init_data_parallel:
            self.init_data_parallel()

    def _sharded(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> nn.Module:
        """``module`` with its collections in sharded form."""
        return shard_parts(module, self.plan, self._env, self.device, sharders)

    def _fused_parts(self) -> list[KeyedOptimizer | tuple[str, KeyedOptimizer]]:
        return [(path, own) for path, _, own in outermost(self.module, _optimizer_of)]

    def reshard(
        self,
        changed_shard_to_params: Mapping[str, tuple[float, EmbeddingModuleShardingPlan]],
        sharded_module_fqn: str | None = None,
    ) -> float:
        """Move tables, with their optimizers' states, to where another plan puts them.

        Every rank calls it between two steps; a training pipeline may go on.  `plan` and
        `fused_optimizer` stay the same objects.  See
        `tessera.training.distributed.collections.sharded_collection.ShardedCollection.update_shards` for
        what stays as it is.

        Args:
            changed_shard_to_params: by module path, what is said to be moved in MiB, and the new
                placements of the tables that move: what `output_sharding_plans_delta` gives.
            sharded_module_fqn: path of the one module whose tables move; None: all that are given.

        Returns:
            What was said to be moved, in MiB.

        Raises:
            UserError: a module that is not given or not sharded, or tables that cannot be moved.
        """
        chosen = list(changed_shard_to_params)
        if sharded_module_fqn is not None:
            if sharded_module_fqn not in changed_shard_to_params:
                raise unknown_name("sharded_module_fqn", sharded_module_fqn, chosen)
            chosen = [sharded_module_fqn]
        for path in chosen:
            if path not in self.plan.plan:
                raise unknown_name("changed_shard_to_params", path, sorted(self.plan.plan))
        moved = 0.0
        for path in chosen:
            volume, changed = changed_shard_to_params[path]
            part = self.module.get_submodule(path)
            assert isinstance(part, ShardedModule), "the plan's modules are sharded"
            sharder = self._sharders[part.unsharded_module_type]
            reshard = getattr(sharder, "reshard", None)
            if reshard is None:
                raise UserError(
                    f"{type(sharder).__name__} of module {path!r} has no reshard; save a checkpoint and "
                    "load it under the other plan"
                )
            reshard(part, changed, self._env_for(part), self.device)
            self.plan.plan[path] = EmbeddingModuleShardingPlan({**self.plan.plan[path], **changed})
            moved += volume
        if self._fused_optimizer is not None:
            self._fused_optimizer.replace_parts(self._fused_parts())
        return moved

    def init_torchrec_delta_tracker(
        self, delta_tracker_config: DeltaTrackerConfig
    ) -> ModelDeltaTracker:
        """The tracker of the rows that are trained on this rank, which begins now unless there is one.

        Args:
            delta_tracker_config: what it keeps, and for whom.

        Raises:
            UserError: tables that cannot be tracked so.
        """
        if self._delta_tracker is None:
            # It knows the sharded collections, which not every program needs.
            from tessera.training.distributed.model_tracker.model_delta_tracker import (  # noqa: PLC0415
                ModelDeltaTrackerTrec,
            )

            config = delta_tracker_config
            self._delta_tracker = ModelDeltaTrackerTrec(
                self._dmp_wrapped_module,
                config.consumers,
                config.delete_on_read,
                config.auto_compact,
                config.tracking_mode,
                config.fqns_to_skip,
            )
        return self._delta_tracker

    def get_delta_tracker(self) -> ModelDeltaTracker | None:
        """The tracker that `init_torchrec_delta_tracker` has made, if it was called."""
        return self._delta_tracker

    def _env_for(self, part: ShardedModule[Any, Any, Any, Any]) -> ShardingEnv:
        """Who takes part in a sharded module of this model."""
        del part
        return self._env

    def init_data_parallel(self) -> None:
        """Wrap what every rank holds whole, once; further calls do nothing."""
        if not self._data_parallel_done:
            if self.device.type != "cpu":
                self._dmp_wrapped_module.to(self.device)
            self._data_parallel_wrapper.wrap(self, self._env, self.device)
            self._data_parallel_done = True

    @property
    def module(self) -> nn.Module:
        """The model with its collections in sharded form, outside of all wrappers."""
        return get_unwrapped_module(self._dmp_wrapped_module)

    @property
    def _plan(self) -> ShardingPlan:
        """The plan under the name of TorchRec's field, which programs read."""
        return self.plan

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer of all fused tables of this rank, by their names in the model.

        Raises:
            UserError: the model has no fused tables.
        """
        if self._fused_optimizer is None:
            raise UserError("the model has no fused tables; give it a collection with some")
        return self._fused_optimizer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; a step of its delta tracker begins, if there is one."""
        if self._delta_tracker is not None:
            self._delta_tracker.step()
        return self._dmp_wrapped_module(*args, **kwargs)

    def copy(self, device: torch.device) -> DistributedModelParallel:
        """A copy whose replicated parts are on ``device``; sharded modules are shared with it.

        Raises:
            ValueError: sharded modules are on another device, which they cannot leave.
        """
        shared = {id(part): part for part in self.modules() if isinstance(part, ShardedModule)}
        copied = copy.deepcopy(self, shared)
        copied.module.to(device)
        copied.device = device
        return copied

    def state_dict(  # type: ignore[override] # torch has overloads for positional use
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> dict[str, Any]:
        """The model's state, tables under the plain collections' names; live memory, no copies."""
        given: dict[str, Any] = {} if destination is None else {"destination": destination}
        return self.module.state_dict(**given, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(  # type: ignore[override] # the signature TorchRec users know
        self,
        state_dict: Mapping[str, Any],
        prefix: str = "",
        strict: bool = True,  # noqa: FBT001, FBT002 - torch's signature
        assign: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> Any:
        """Copy a state dict into the model: whole tables, or shards as this rank has them.

        Args:
            state_dict: of this model or of its plain form.
            prefix: what its names begin with; other names are left out.
            strict: whether missing and unknown names are errors.
            assign: refused, see below.

        Raises:
            ValueError: ``assign``: the tables' memory belongs to their operators.
            RuntimeError: torch's, for names or shapes that do not fit.
        """
        if assign:
            raise ValueError("assign is True; fused tables are filled in place, so give False")
        own = {
            name.removeprefix(prefix): value
            for name, value in state_dict.items()
            if name.startswith(prefix)
        }
        return self.module.load_state_dict(own, strict=strict)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's, this rank's shards included; arguments as for torch's modules."""
        return self.module.named_parameters(*args, **kwargs)

    def bare_named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,  # noqa: FBT001, FBT002 - torch's signature
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters without any wrapper's names, each once."""
        return self.module.named_parameters(prefix, recurse)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's; arguments as for torch's modules."""
        return self.module.named_buffers(*args, **kwargs)

    def sparse_grad_parameter_names(
        self, destination: list[str] | None = None, prefix: str = ""
    ) -> list[str]:
        """The parameters whose gradients are sparse tensors (``sparse=True`` of torch's tables)."""
        names = [] if destination is None else destination
        names.extend(
            f"{prefix}{path}.weight" if path else f"{prefix}weight"
            for path, part in self.module.named_modules()
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
        )
        return names


def _optimizer_of(part: nn.Module) -> KeyedOptimizer | None:
    return part.fused_optimizer if isinstance(part, FusedOptimizerModule) else None


def get_module(module: nn.Module) -> nn.Module:
    """What is inside a `DistributedModelParallel`, still in its data-parallel wrapper."""
    while isinstance(module, DistributedModelParallel):
        module = module._dmp_wrapped_module  # noqa: SLF001 - this module's own class
    return module


def _is_fully_sharded(module: nn.Module) -> bool:
    # Nobody has wrapped in it before it was imported.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def get_unwrapped_module(module: nn.Module) -> nn.Module:
    """The model inside of `DistributedModelParallel`, ``DistributedDataParallel`` and FSDP."""
    while True:
        if isinstance(module, DistributedModelParallel):
            module = module._dmp_wrapped_module  # noqa: SLF001 - this module's own class
        elif isinstance(module, DistributedDataParallel) or _is_fully_sharded(module):
            module = module.get_submodule("module")
        else:
            return module
