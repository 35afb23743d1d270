"""2D parallelism: tables are spread over a group of ranks, and every group has all of them.

Spread over all ranks of a large job, each step's ids and vectors go between all of them.  In groups, they
stay within a group; the copies of a shard train by themselves, each on its own group's batches, and `sync`
averages them.  What is not sharded is averaged over all ranks in every step, as without groups.  The method
is described in arXiv:2504.21254; the names are TorchRec's.

With plain SGD and a sync after every step the weights are those of one model that is trained on all batches.
With another optimizer, or rarer syncs, they are not: each copy has its own optimizer state in between
(local SGD, arXiv:1805.09767).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tessera.errors import UserError
from tessera.training.distributed.comm.environment_2d import (
    ShardingEnv2D,
    replica_mesh,
    sharding_groups,
)
from tessera.training.distributed.model.data_parallel import DataParallelWrapper
from tessera.training.distributed.model.model_parallel import DistributedModelParallel
from tessera.training.distributed.model.replica_config import DMPCollectionConfig
from tessera.training.distributed.model.shard import shard_parts
from tessera.training.distributed.plan.plan_types import ShardingPlan
from tessera.training.distributed.plan.sharded_module import (
    ModuleSharder,
    ShardedModule,
    outermost,
)
from tessera.training.distributed.planner.generators import get_default_sharders
from tessera.training.distributed.tables.batched_kernels import Kernel

AllReduce = Callable[[list[Tensor]], None]
"""Replaces each tensor, in place, by its mean over the ranks that hold the same shards."""


class DMPCollection(DistributedModelParallel):
    """A model whose tables are spread over groups of ranks, each of which holds a copy of it.

    In state dicts a table is spread over this rank's sharding group.  After `sync` the groups' are alike, so
    a checkpoint of all ranks is that of one model, which any `DistributedModelParallel` loads.

    Call `sync` on every rank after a step, or after some; and before a checkpoint is saved.

    Args:
        module: the model; it is changed, and parts of it may be on the ``meta`` device.
        device: where this rank computes.
        plan: where tables live among the ranks of one sharding group, 0 to ``sharding_group_size - 1``; all
            groups have the same.  None: what `EmbeddingShardingPlanner.collective_plan` says.
        world_size: number of all ranks.
        sharding_group_size: number of ranks that hold one copy; a divisor of ``world_size``.
        global_pg: all ranks.
        node_group_size: how many successive ranks of a sharding group count as a node to strategies that
            know nodes; None: as many as the launcher's environment says.
        sharders: one per type of module; None: the default ones.
        init_data_parallel: see `DistributedModelParallel`.
        init_parameters: the same.
        data_parallel_wrapper: the same.
        use_inter_host_allreduce: whether sharding groups are of successive ranks, so that averages go
            between nodes; see `tessera.training.distributed.comm.environment_2d`.
        custom_all_reduce: what averages the copies' weights and optimizer states; None: one all-reduce of
            all tensors of a data type.
        submodule_configs: for modules of some types, a plan and groups of their own.

    Raises:
        UserError: groups that do not make up the world, or a plan that does not fit the model.
        PlannerError: there is no plan.
    """

    _env: ShardingEnv2D

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        module: nn.Module,
        device: torch.device,
        plan: ShardingPlan | None,
        world_size: int,
        sharding_group_size: int,
        global_pg: dist.ProcessGroup,
        node_group_size: int | None = None,
        sharders: list[ModuleSharder[Any]] | None = None,
        init_data_parallel: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        init_parameters: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        data_parallel_wrapper: DataParallelWrapper | None = None,
        use_inter_host_allreduce: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        custom_all_reduce: AllReduce | None = None,
        submodule_configs: list[DMPCollectionConfig] | None = None,
    ) -> None:
        if not world_size == global_pg.size() == dist.get_world_size():
            raise UserError(
                f"world_size is {world_size}, global_pg has {global_pg.size()} ranks, and there are "
                f"{dist.get_world_size()}; give the group of all ranks and their number"
            )
        grids = _Grids(global_pg, torch.device(device).type)
        env = grids.env(sharding_group_size, node_group_size, successive=use_inter_host_allreduce)
        configs = submodule_configs or []
        if plan is not None and configs:
            own = {path: places for config in configs for path, places in config.plan.plan.items()}
            plan = ShardingPlan({**plan.plan, **own})
        elif configs:
            raise UserError(
                "submodule_configs have plans and plan is None; give the others' plan too"
            )
        sharders = sharders or get_default_sharders()
        self._env_of_type = {
            config.module: grids.env(
                config.sharding_group_size,
                config.node_group_size,
                successive=config.use_inter_host_allreduce,
            )
            for config in configs
        }
        self._custom_all_reduce = custom_all_reduce
        super().__init__(
            module,
            env,
            device,
            plan,
            sharders,
            init_data_parallel,
            init_parameters,
            data_parallel_wrapper,
        )
        for own_env, kernels in self._copied_kernels():
            for kernel in kernels:
                for weight in kernel.split_embedding_weights():
                    dist.broadcast(weight, group=own_env.replica_pg, group_src=0)
                kernel.purge()

    def _sharded(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> nn.Module:
        envs = dict(self._env_of_type)
        return shard_parts(module, self.plan, self._env, self.device, sharders, env_of_type=envs)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The grid of all ranks; its dimensions are called ``replicate`` and ``shard``."""
        return self._env.device_mesh

    def set_all_reduce_hook(self, reduce_hook: AllReduce) -> None:
        """Let ``reduce_hook`` average the copies from now on."""
        self._custom_all_reduce = reduce_hook

    def _env_for(self, part: ShardedModule[Any, Any, Any, Any]) -> ShardingEnv2D:
        return self._env_of_type.get(part.unsharded_module_type, self._env)

    def _copied_kernels(self) -> Iterator[tuple[ShardingEnv2D, list[Kernel]]]:
        """The kernels whose tables are spread, with the groups that they are spread over."""
        found = outermost(
            self.module, lambda part: part if isinstance(part, ShardedModule) else None
        )
        for _, _, part in found:
            kernels = [
                kernel
                for kernel in getattr(part, "table_kernels", list)()
                # Tables that every rank holds whole are averaged with the rest of the model.
                if kernel.tables[0].local_metadata is not None
            ]
            if kernels:
                yield self._env_for(part), kernels

    @torch.no_grad()
    def sync(self, include_optimizer_state: bool = True) -> None:  # noqa: FBT001, FBT002 - the signature TorchRec users know
        """Average the copies of every table; every rank calls it between two steps.

        Weights of tables that the user's own optimizer trains are averaged too; that optimizer's state is
        left alone, and so are the numbers of steps, in which copies do not differ.

        Args:
            include_optimizer_state: whether the states of the fused optimizers are averaged too.
        """
        by_env: dict[int, tuple[ShardingEnv2D, list[Kernel]]] = {}
        for env, kernels in self._copied_kernels():
            by_env.setdefault(id(env), (env, []))[1].extend(kernels)
        for env, kernels in by_env.values():
            for kernel in kernels:
                kernel.flush()
            self._average([w for k in kernels for w in k.split_embedding_weights()], env)
            if include_optimizer_state:
                self._average([s for k in kernels for s in k.optimizer_states()], env)
            for kernel in kernels:
                kernel.purge()

    def _average(self, tensors: list[Tensor], env: ShardingEnv2D) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for alike in by_dtype.values():
            if self._custom_all_reduce is not None:
                self._custom_all_reduce(alike)
            else:
                _average_over(alike, env.replica_pg)


def _average_over(tensors: list[Tensor], pg: dist.ProcessGroup) -> None:
    """Replace each tensor, all of one data type, by its mean over the ranks of ``pg``."""
    options = dist.AllreduceCoalescedOptions()
    # Gloo, which carries tensors on the CPU, has no mean.
    has_mean = tensors[0].is_cuda
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if has_mean else dist.ReduceOp.SUM)
    pg.allreduce_coalesced(tensors, options).wait()
    if not has_mean:
        for tensor in tensors:
            tensor.div_(pg.size())


class _Grids:
    """The grids of ranks by the size and the kind of their groups, each made once."""

    def __init__(self, global_pg: dist.ProcessGroup, device_type: str) -> None:
        self._global_pg, self._device_type = global_pg, device_type
        self._made: dict[tuple[int, bool], DeviceMesh] = {}

    def env(self, size: int, node_group_size: int | None, *, successive: bool) -> ShardingEnv2D:
        groups = sharding_groups(self._global_pg.size(), size, use_inter_host_allreduce=successive)
        if (size, successive) not in self._made:
            self._made[size, successive] = replica_mesh(self._device_type, groups)
        mesh = self._made[size, successive]
        return ShardingEnv2D(
            mesh.get_group("shard"),
            mesh.get_group("replicate"),
            self._global_pg,
            mesh,
            node_group_size,
            successive,
        )
