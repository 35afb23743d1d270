"""What the sharded forms of both quantized collections share.

Legend: ``W`` devices, ``B`` samples, ``D`` columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, cast

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training.distributed.collections.sharders import BaseQuantEmbeddingSharder
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.inference.cw_sharding import InferCwEmbeddingSharding
from tessera.training.distributed.inference.lookup import OUTPUT_DTYPE, ROW_ALIGNMENT
from tessera.training.distributed.inference.rw_sharding import InferRwEmbeddingSharding
from tessera.training.distributed.inference.sharding import InferSharding, Route
from tessera.training.distributed.inference.shards import InferTable, shards_of
from tessera.training.distributed.plan.plan_types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingType,
)
from tessera.training.distributed.plan.sharded_module import M
from tessera.training.distributed.sharding.interfaces import EmbeddingShardingInfo
from tessera.training.distributed.sharding.mixins import FeatureShardingMixIn, ModuleShardingMixIn
from tessera.training.distributed.sharding.registry import strategy_of
from tessera.training.distributed.tables.table_shards import GroupedEmbeddingConfig
from tessera.training.distributed.travel.kjt_list import KJTList, ListOfKJTList
from tessera.training.modules.embedding_configs import EmbeddingTableConfig, PoolingType
from tessera.training.quant.lookup import QuantizedRows, StoredPart
from tessera.training.quant.stored_collection import (
    Config,
    StoredCollection,
    refuse_varying,
    refuse_wrong_ids,
)
from tessera.training.sparse import selection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.streamable import Multistreamable

SHARDINGS: dict[str, type[InferSharding]] = {
    # Table-wise is the case of one block that has all columns.
    ShardingType.TABLE_WISE.value: InferCwEmbeddingSharding,
    ShardingType.COLUMN_WISE.value: InferCwEmbeddingSharding,
    ShardingType.ROW_WISE.value: InferRwEmbeddingSharding,
}


class QuantCollectionContext(Multistreamable):
    """What the steps of one batch share.

    Attributes:
        features: the collection's features, in its order.
        routes: per sharding, where each id went.
    """

    def __init__(self) -> None:
        self.features: KeyedJaggedTensor | None = None
        self.routes: list[Route] = []

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until ``stream`` is done with it."""
        if self.features is not None:
            self.features.record_stream(stream)
        for route in self.routes:
            if route is not None:
                route.record_stream(stream)


class QuantInputDist(nn.Module):
    """Sends each sharding its features.

    Args:
        shardings: one per sharding type.
    """

    def __init__(self, shardings: Sequence[InferSharding]) -> None:
        super().__init__()
        self._shardings = nn.ModuleList(shardings)

    def forward(self, features: KeyedJaggedTensor) -> tuple[ListOfKJTList, list[Route]]:
        """Each sharding's features on their devices, and where each id went."""
        sent: list[KJTList] = []
        routes: list[Route] = []
        for sharding in cast("list[InferSharding]", list(self._shardings)):
            features_of_devices, route = sharding.input_dist(features)
            sent.append(features_of_devices)
            routes.append(route)
        return ListOfKJTList(sent), routes


def create_infer_sharding(
    sharding_type: str,
    sharding_infos: Sequence[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None = None,
    *,
    pooled: bool,
) -> InferSharding:
    """The tables of one sharding type on the devices of this process.

    Args:
        sharding_type: ``table_wise``, ``column_wise`` or ``row_wise``.
        sharding_infos: the tables; ``param`` holds their stored rows ``[rows, row bytes]`` uint8,
            which are copied.
        env: how many devices.
        device: the devices' type; None: ``cuda`` where there is one, else ``cpu``.
        pooled: whether the vectors of a bag are added up.

    Raises:
        UserError: inference has no such strategy, or the plan cannot be followed.
    """
    if strategy_of(sharding_type).name not in SHARDINGS:
        raise UserError(
            f"sharding_type is {sharding_type!r}; quantized tables are sharded "
            f"{', '.join(SHARDINGS)}"
        )
    return SHARDINGS[sharding_type](
        [
            InferTable(
                config=info.embedding_config,
                shards=shards_of(info.embedding_config, info.param_sharding, env.world_size),
                is_weighted=info.embedding_config.is_weighted,
            )
            for info in sharding_infos
        ],
        {info.embedding_config.name: info.param for info in sharding_infos},
        world_size=env.world_size,
        device=inference_device(device),
        pooled=pooled,
        fused_params=sharding_infos[0].fused_params if sharding_infos else None,
    )


def inference_device(device: torch.device | None) -> torch.device:
    """``device``, or ``cuda`` where there is one, else ``cpu``."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class ShardedQuantCollection(nn.Module, ModuleShardingMixIn, Generic[Config]):
    """Tables of a quantized collection on the devices of this process.

    Args:
        module: the quantized collection; its rows are copied to the devices.
        table_name_to_parameter_sharding: the plan.
        env: how many devices: ``ShardingEnv.from_local``.
        fused_params: ``output_dtype`` and ``row_alignment``; None: the module's own.
        device: the devices' type; None: ``cuda`` where there is one, else ``cpu``.

    Attributes:
        configs: the tables.

    Raises:
        UserError: the plan leaves a table out, or cannot be followed.
    """

    def __init__(
        self,
        module: StoredCollection[Config],
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        plan = table_name_to_parameter_sharding
        self.configs = tables = list(module.configs)
        missing = [table.name for table in tables if table.name not in plan]
        if missing:
            raise UserError(f"the plan says nothing of table {missing[0]!r}")
        settings = {
            OUTPUT_DTYPE: module.output_dtype(),
            ROW_ALIGNMENT: module.rows.row_alignment,
            **(fused_params or {}),
        }
        self._output_dtype: torch.dtype = settings[OUTPUT_DTYPE]
        self._infos: dict[str, list[EmbeddingShardingInfo]] = {}
        for table, rows in zip(tables, module.rows.tables(), strict=True):
            where = plan[table.name]
            config = EmbeddingTableConfig(
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                name=table.name,
                data_type=table.data_type,
                feature_names=list(table.feature_names),
                pooling=getattr(table, "pooling", PoolingType.NONE),
                is_weighted=module.weighted,
            )
            self._infos.setdefault(where.sharding_type, []).append(
                EmbeddingShardingInfo(config, where, rows, settings)
            )
        self._shardings = {
            kind: create_infer_sharding(kind, infos, env, device, pooled=module.pooled)
            for kind, infos in self._infos.items()
        }
        for infos in self._infos.values():
            for info in infos:
                # The rows are copied; the unsharded ones may go.
                info.param = info.param.to("meta")
        self._feature_names = [name for table in tables for name in table.feature_names]
        order = [
            (info.embedding_config.name, name)
            for infos in self._infos.values()
            for info in infos
            for name in info.embedding_config.feature_names
        ]
        # Where each feature of each table stands in the shardings' outputs.
        self._places = [
            order.index((table.name, name)) for table in tables for name in table.feature_names
        ]
        self._row_counts = torch.tensor(
            [table.num_embeddings for table in tables for _ in table.feature_names]
        )
        self._lookups = nn.ModuleList(s.lookup() for s in self._shardings.values())
        self._input_dist_module = QuantInputDist(list(self._shardings.values()))
        self._name_buffers(module.holder)

    def _name_buffers(self, holder: str) -> None:
        """Make every block a buffer: ``<holder>.<table>.weight``, or ``weight_<i>`` of several."""
        tables = nn.ModuleDict({table.name: nn.Module() for table in self.configs})
        self.add_module(holder, tables)
        blocks: dict[str, list[Tensor]] = {}
        for sharding in self._shardings.values():
            for table, _, rows in sharding.stored_blocks():
                blocks.setdefault(table.name, []).append(rows)
        for name, own in blocks.items():
            for index, rows in enumerate(own):
                buffer = "weight" if len(own) == 1 else f"weight_{index}"
                tables.get_submodule(name).register_buffer(buffer, rows)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:  # noqa: FBT001, FBT002 - torch's signature
        # The tables are spread over devices of one type, and hold no float that a cast changes.
        del recurse
        device = next(iter(self._shardings.values())).output_device
        wanted = fn(torch.empty(0, dtype=torch.uint8, device=device)).device
        if wanted.type != device.type:
            raise UserError(
                f"a sharded quantized collection stays on its devices ({device.type}); move the "
                f"collection to {wanted.type} before sharding it, or shard it with that device"
            )
        return self

    def copy(self, device: torch.device) -> ShardedQuantCollection[Config]:
        """Itself: the tables are too large to exist twice.

        Raises:
            UserError: ``device`` is of another type than the collection's.
        """
        return self.to(device)

    def sharding_type_to_sharding_infos(self) -> dict[str, list[EmbeddingShardingInfo]]:
        """The tables by `ShardingType` name; their ``param`` has a shape, and no memory."""
        return self._infos

    @property
    def shardings(self) -> Mapping[str, FeatureShardingMixIn]:
        """By `ShardingType` name."""
        return self._shardings

    def tbes_configs(self) -> dict[QuantizedRows, list[GroupedEmbeddingConfig]]:
        """The operators of all devices, and the shards that each serves."""
        operators: dict[QuantizedRows, list[GroupedEmbeddingConfig]] = {}
        for sharding in self._shardings.values():
            operators.update(sharding.lookup().get_tbes_to_register())
        return operators

    def blocks(self) -> list[StoredPart]:
        """What is stored, device by device."""
        return [
            StoredPart(
                table=table.name,
                device=shard.rank,
                row=shard.row,
                column=shard.column,
                columns=shard.columns,
                rows=rows,
            )
            for sharding in self._shardings.values()
            for table, shard, rows in sharding.stored_blocks()
        ]

    def output_dtype(self) -> torch.dtype:
        """The type of the vectors."""
        return self._output_dtype

    def create_context(self) -> QuantCollectionContext:
        """What the steps of one batch share."""
        return QuantCollectionContext()

    def input_dist(self, ctx: QuantCollectionContext, features: KeyedJaggedTensor) -> ListOfKJTList:
        """Each sharding's features on their devices.

        Raises:
            IndexError: an id on the CPU is not a row of its table.
            KeyError: a feature is missing.
            ValueError: the batch varies per key.
        """
        if isinstance(features, KeyedJaggedTensor):
            refuse_varying(features)
        ctx.features = selection.select_features(features, self._feature_names)
        if isinstance(ctx.features.values(), Tensor) and ctx.features.values().device.type == "cpu":
            refuse_wrong_ids(ctx.features, self._row_counts, self.configs)
        sent: ListOfKJTList
        sent, ctx.routes = self._input_dist_module(features)
        return sent

    def compute(self, ctx: QuantCollectionContext, dist_input: ListOfKJTList) -> list[list[Tensor]]:
        """Look up: per sharding, per device."""
        del ctx
        lookups = enumerate(self._lookups)
        return [lookup(dist_input[index]) for index, lookup in lookups]

    def in_order(self, vectors: list[Tensor]) -> list[Tensor]:
        """The features' vectors, sharding by sharding, in the tables' order."""
        return [vectors[place] for place in self._places]


class QuantCollectionSharder(BaseQuantEmbeddingSharder[M]):
    """Base of the sharders: a plan sees the tables' logical sizes.

    Args:
        fused_params: ``output_dtype`` and ``row_alignment`` of the lookups.
        shardable_params: names of the tables that may be sharded; None: all.
    """

    _unsharded: type[M]
    _sharded: ClassVar[type[ShardedQuantCollection[Any]]]

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """By table name ``[rows, columns]`` uint8 on the ``meta`` device.

        The stored rows hold scales and padding besides; where a column block begins is counted
        in columns of the table.
        """
        assert isinstance(module, StoredCollection)
        return {
            part.name: nn.Parameter(
                torch.empty(part.rows, part.dim, dtype=torch.uint8, device="meta"),
                requires_grad=False,
            )
            for part in module.rows.parts()
            if self._shardable_params is None or part.name in self._shardable_params
        }

    def shard(
        self,
        module: M,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> ShardedQuantCollection[Any]:
        """The sharded form of ``module``; see `ShardedQuantCollection`."""
        assert isinstance(module, StoredCollection)
        return self._sharded(module, params, env, self.fused_params, device)

    @property
    def module_type(self) -> type[M]:
        """What it shards."""
        return self._unsharded
