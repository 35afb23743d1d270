"""Embedding collections behind managed collisions, spread over ranks by rows.

A batch goes the way of any row-wise batch, but for two things: its ids travel by the ranges that the ranks map
(`tessera.training.distributed.collections.managed_collisions`), and where they arrive they become rows before the lookup.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training.distributed.collections.managed_collisions import (
    RowsBack,
    ShardedManagedCollisionCollection,
)
from tessera.training.distributed.collections.pooled import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from tessera.training.distributed.collections.pooled_output import EmbeddingBagCollectionContext
from tessera.training.distributed.collections.sharded_collection import ShardedEmbeddingModule
from tessera.training.distributed.collections.sharders import BaseEmbeddingSharder
from tessera.training.distributed.collections.unpooled import (
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from tessera.training.distributed.comm.awaitable import Awaitable, LazyAwaitable
from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.plan.plan_types import EmbeddingModuleShardingPlan, ShardingType
from tessera.training.distributed.sharding.embedding_sharding import TableSharding
from tessera.training.distributed.sharding.sequence_sharding import SequenceShardingContext
from tessera.training.distributed.tables.batched_kernels import Kernel
from tessera.training.distributed.travel.kjt_list import KJTList
from tessera.training.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from tessera.training.modules.mc_modules import ManagedCollisionCollection
from tessera.training.optim.fused import FusedOptimizerModule
from tessera.training.optim.keyed import CombinedOptimizer
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

M = TypeVar("M", bound=BaseManagedCollisionEmbeddingCollection)
Vectors = KeyedTensor | dict[str, JaggedTensor]


@dataclass
class ManagedCollisionEmbeddingBagCollectionContext(EmbeddingBagCollectionContext):
    """Holds what the steps of one batch share.

    Attributes:
        remapped_kjt: the rows of the ids that came here.
    """

    remapped_kjt: KeyedJaggedTensor | None = None


@dataclass
class ManagedCollisionEmbeddingCollectionContext(EmbeddingCollectionContext):
    """Holds what the steps of one batch share.

    Attributes:
        remapped_kjt: the rows of the ids that came here.
    """

    remapped_kjt: KeyedJaggedTensor | None = None


Context = ManagedCollisionEmbeddingBagCollectionContext | ManagedCollisionEmbeddingCollectionContext


class ManagedCollisionCollectionAwaitable(LazyAwaitable[KeyedJaggedTensor]):
    """Waits for the rows of the ids that this rank sent.

    Args:
        rows: ``[N, 1]`` int64, under way.
        features: the ids that were sent.
    """

    def __init__(self, rows: Awaitable[Tensor], features: KeyedJaggedTensor) -> None:
        super().__init__()
        self._rows, self._features = rows, features

    def _wait_impl(self) -> KeyedJaggedTensor:
        return self._features.with_values(self._rows.wait().squeeze(1))


class ManagedCollisionCollectionSharder:
    """Turns `ManagedCollisionCollection` into its sharded form, beside the tables that it is before."""

    @property
    def module_type(self) -> type[ManagedCollisionCollection]:
        """The type of module that this sharder takes."""
        return ManagedCollisionCollection

    def shard(
        self,
        module: ManagedCollisionCollection,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        embedding_shardings: list[TableSharding],
        device: torch.device | None = None,
    ) -> ShardedManagedCollisionCollection:
        """The sharded form; see `ShardedManagedCollisionCollection`.

        The plan ``params`` has become ``embedding_shardings``, which say more.
        """
        del params
        return ShardedManagedCollisionCollection(module, env, embedding_shardings, device)


class BaseShardedManagedCollisionEmbeddingCollection(
    ShardedEmbeddingModule[KJTList, list[Tensor], tuple[Any, Any], Any], FusedOptimizerModule
):
    """A collection behind managed collisions whose tables and maps live where a plan puts them.

    Input and output are those of the plain module, for this rank's own samples; parameters and state
    dicts have its names.

    Args:
        module: the plain module.
        table_name_to_parameter_sharding: the plan: row-wise.
        e_sharder: shards the tables.
        mc_sharder: shards the maps.
        env: who takes part.
        device: where this rank computes; None: the CPU.

    Raises:
        UserError: see `ShardedManagedCollisionCollection`.
    """

    _context: ClassVar[type[Any]]

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        module: BaseManagedCollisionEmbeddingCollection,
        table_name_to_parameter_sharding: EmbeddingModuleShardingPlan,
        e_sharder: EmbeddingBagCollectionSharder | EmbeddingCollectionSharder,
        mc_sharder: ManagedCollisionCollectionSharder,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(e_sharder.qcomm_codecs_registry)
        plan = table_name_to_parameter_sharding
        tables = e_sharder.shard(module._embedding_module, plan, env, device)  # noqa: SLF001 - the plain form, of the sharder's type
        assert isinstance(tables, (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection))
        shardings = list(tables.shardings.values())
        self._embedding_module = tables
        self._managed_collision_collection = mc_sharder.shard(
            module._managed_collision_collection,  # noqa: SLF001 - as above
            plan,
            env,
            shardings,
            device,
        )
        self._return_remapped_features = module._return_remapped_features  # noqa: SLF001 - as above
        self._rows_back = RowsBack(shardings[0], device or torch.device("cpu"))
        # Ids travel to the ranks that map them, and the rows need a way back.
        tables._input_dists = [self._managed_collision_collection.create_input_dist()]  # noqa: SLF001 - shown as this module's
        tables._sharding_context = SequenceShardingContext  # noqa: SLF001 - as above
        if isinstance(tables, ShardedEmbeddingCollection):
            # Ids that are sent once each are told apart as rows, which they are not yet.
            tables._deduplicators = [None]  # noqa: SLF001 - as above
        self._input_dists = tables._input_dists  # noqa: SLF001 - as above
        self._lookups = tables._lookups  # noqa: SLF001 - as above
        self._output_dists = tables._output_dists  # noqa: SLF001 - as above

    @property
    def shardings(self) -> Mapping[str, TableSharding]:
        """The shardings of the tables by sharding type."""
        return self._embedding_module.shardings

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizer of the fused tables here, which works in the backward pass."""
        return CombinedOptimizer([("_embedding_module", self._embedding_module.fused_optimizer)])

    def table_kernels(self) -> list[Kernel]:
        """What holds the shards of this rank."""
        return self._embedding_module.table_kernels()

    def purge(self) -> None:
        """Give ids rows of the ranks that they belong to, after a checkpoint was loaded; every rank calls it.

        Nothing happens, and nothing travels, unless the checkpoint was saved on ranks with other blocks.
        """
        tables = self._embedding_module._tables  # noqa: SLF001 - this module's own
        tables.purge()
        self._managed_collision_collection.spread(tables.kernels())
        tables.purge()

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """The names of the tables' shards and of the maps' parts, which differ from rank to rank."""
        for name, part in self.named_children():
            inner = f"{prefix}.{name}" if prefix else name
            if isinstance(
                part,
                (
                    ShardedManagedCollisionCollection,
                    ShardedEmbeddingBagCollection,
                    ShardedEmbeddingCollection,
                ),
            ):
                yield from part.sharded_parameter_names(inner)

    def create_context(self) -> Any:
        """Return a new context, which holds what the steps of one batch share."""
        return self._context()

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Begin to send ids to the ranks that map them.

        Raises:
            KeyError: a feature is missing.
            ValueError: the values are not int32 or int64, or what the collection says.
        """
        ids = self._managed_collision_collection.preprocess(features)
        return self._embedding_module.input_dist(ctx, ids)

    def compute(self, ctx: Any, dist_input: KJTList) -> list[Tensor]:
        """Map the received ids to rows, and look those up; rows that got another id begin anew."""
        (received,) = dist_input
        maps = self._managed_collision_collection
        ctx.remapped_kjt = maps.remap(received)
        if self.training:
            self._evict(maps.evict())
        return self._embedding_module.compute(ctx, KJTList([maps.local_rows(ctx.remapped_kjt)]))

    @torch.no_grad()
    def _evict(self, evictions_per_table: Mapping[str, Tensor | None]) -> None:
        """Give rows of the blocks here new first values."""
        tables = self._embedding_module._tables  # noqa: SLF001 - this module's own
        changed = {
            name: rows
            for name, rows in evictions_per_table.items()
            if rows is not None and rows.numel()
        }
        if not changed:
            return
        tables.flush()
        for name, rows in changed.items():
            ((shard, values),) = tables.modules[name].shards
            fresh = values.data.new_empty(rows.numel(), values.size(1))
            shard.init_weights(fresh)
            values.data[rows.to(values.device)] = fresh
        tables.purge()

    def output_dist(self, ctx: Any, output: list[Tensor]) -> Any:
        """Begin to send vectors, and rows if they were asked for, to the ranks of their ids."""
        vectors = self._embedding_module.output_dist(ctx, output)
        if not self._return_remapped_features:
            return vectors, None
        (context,) = ctx.sharding_contexts
        assert ctx.remapped_kjt is not None
        rows = self._rows_back(ctx.remapped_kjt, context)
        return vectors, ManagedCollisionCollectionAwaitable(
            rows, context.features_before_input_dist
        )


class ShardedManagedCollisionEmbeddingBagCollection(BaseShardedManagedCollisionEmbeddingCollection):
    """The sharded form of `ManagedCollisionEmbeddingBagCollection`."""

    _context = ManagedCollisionEmbeddingBagCollectionContext

    @property
    def unsharded_module_type(self) -> type[ManagedCollisionEmbeddingBagCollection]:
        """The type of module that this is the sharded form of."""
        return ManagedCollisionEmbeddingBagCollection

    @property
    def _embedding_bag_collection(self) -> nn.Module:
        return self._embedding_module


class ShardedManagedCollisionEmbeddingCollection(BaseShardedManagedCollisionEmbeddingCollection):
    """The sharded form of `ManagedCollisionEmbeddingCollection`; each id is sent as often as it comes."""

    _context = ManagedCollisionEmbeddingCollectionContext

    @property
    def unsharded_module_type(self) -> type[ManagedCollisionEmbeddingCollection]:
        """The type of module that this is the sharded form of."""
        return ManagedCollisionEmbeddingCollection

    @property
    def _embedding_collection(self) -> nn.Module:
        return self._embedding_module


class BaseManagedCollisionEmbeddingCollectionSharder(BaseEmbeddingSharder[M]):
    """Turns a collection behind managed collisions into its sharded form.

    Args:
        e_sharder: shards the tables.
        mc_sharder: shards the maps.
        qcomm_codecs_registry: as of ``e_sharder``; here for programs that hand it on.
    """

    _sharded: type[BaseShardedManagedCollisionEmbeddingCollection]

    def __init__(
        self,
        e_sharder: EmbeddingBagCollectionSharder | EmbeddingCollectionSharder,
        mc_sharder: ManagedCollisionCollectionSharder,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(e_sharder.fused_params, qcomm_codecs_registry)
        self._e_sharder, self._mc_sharder = e_sharder, mc_sharder

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """The weights of the tables by table name."""
        return self._e_sharder.shardable_parameters(module._embedding_module)  # noqa: SLF001 - the plain form of what this makes

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Row-wise: each rank maps ids to rows of its own."""
        del compute_device_type
        return [ShardingType.ROW_WISE.value]

    def shard(
        self,
        module: M,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> BaseShardedManagedCollisionEmbeddingCollection:
        """The sharded form of ``module``, with its weights and empty maps.

        Raises:
            UserError: the plan or the module does not fit; see the sharded form.
        """
        return self._sharded(module, params, self._e_sharder, self._mc_sharder, env, device)


class ManagedCollisionEmbeddingBagCollectionSharder(
    BaseManagedCollisionEmbeddingCollectionSharder[ManagedCollisionEmbeddingBagCollection]
):
    """Turns `ManagedCollisionEmbeddingBagCollection` into its sharded form.

    Args:
        ebc_sharder: shards the tables; None: one of the other arguments.
        mc_sharder: shards the maps; None: the default.
        fused_params: the tables' optimizer.
        qcomm_codecs_registry: how vectors are written for the network.
    """

    _plain = ManagedCollisionEmbeddingBagCollection
    _sharded = ShardedManagedCollisionEmbeddingBagCollection

    def __init__(
        self,
        ebc_sharder: EmbeddingBagCollectionSharder | None = None,
        mc_sharder: ManagedCollisionCollectionSharder | None = None,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(
            ebc_sharder or EmbeddingBagCollectionSharder(fused_params, qcomm_codecs_registry),
            mc_sharder or ManagedCollisionCollectionSharder(),
            qcomm_codecs_registry,
        )


class ManagedCollisionEmbeddingCollectionSharder(
    BaseManagedCollisionEmbeddingCollectionSharder[ManagedCollisionEmbeddingCollection]
):
    """Turns `ManagedCollisionEmbeddingCollection` into its sharded form.

    Args:
        ec_sharder: shards the tables; None: one of the other arguments.
        mc_sharder: shards the maps; None: the default.
        fused_params: the tables' optimizer.
        qcomm_codecs_registry: how vectors are written for the network.

    Raises:
        UserError: ``ec_sharder`` sends each id once, which takes rows in the place of ids.
    """

    _plain = ManagedCollisionEmbeddingCollection
    _sharded = ShardedManagedCollisionEmbeddingCollection

    def __init__(
        self,
        ec_sharder: EmbeddingCollectionSharder | None = None,
        mc_sharder: ManagedCollisionCollectionSharder | None = None,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        if ec_sharder is not None and ec_sharder.use_index_dedup:
            raise UserError(
                "ec_sharder has use_index_dedup=True, which goes by rows, and ids become rows where they "
                "arrive; leave it out"
            )
        super().__init__(
            ec_sharder or EmbeddingCollectionSharder(fused_params, qcomm_codecs_registry),
            mc_sharder or ManagedCollisionCollectionSharder(),
            qcomm_codecs_registry,
        )
