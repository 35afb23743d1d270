"""A pooled collection of one process whose tables are updated in the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tessera.training.distributed.tables.batched_kernels import BatchedFusedEmbeddingBag
from tessera.training.distributed.tables.table_module import ShardedTable
from tessera.training.distributed.tables.table_shards import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from tessera.training.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    data_type_to_dtype,
)
from tessera.training.modules.tables import (
    DescribesPooled,
    EmbeddingBagCollectionInterface,
    check_feature_names,
    check_tables,
    embedding_names,
    get_embedding_names_by_table,
)
from tessera.training.optim.apply_optimizer_in_backward import convert_optimizer_type_and_kwargs
from tessera.training.optim.combined_optimizer import CombinedOptimizer
from tessera.training.optim.keyed_optimizer import KeyedOptimizer
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

_PLACES = {
    "HOST": EmbeddingComputeKernel.FUSED,
    "DEVICE": EmbeddingComputeKernel.FUSED,
    "MANAGED": EmbeddingComputeKernel.FUSED_UVM,
    "MANAGED_CACHING": EmbeddingComputeKernel.FUSED_UVM_CACHING,
}


class FusedEmbeddingBagCollection(DescribesPooled, EmbeddingBagCollectionInterface):
    """Looks up and pools as `EmbeddingBagCollection`, and updates its tables in the backward pass.

    Parameters and state dicts have the names of the plain collection, ``embedding_bags.NAME.weight``.
    `DistributedModelParallel` shards it over ranks.

    Args:
        tables: the tables; their order, and the order of ``feature_names`` within each, is the
            order of the output's keys.
        optimizer_type: an optimizer that has a fused form, of torch's or of
            `tessera.training.optim.optimizers`.
        optimizer_kwargs: for its constructor.
        is_weighted: whether each id's vector is multiplied by the id's weight.
        device: the CPU (None), a CUDA device, or ``torch.device("meta")``, which makes tables without
            memory: they may be sharded, and not be looked up.
        location: FBGEMM's ``EmbeddingLocation`` of the rows; None: on ``device``.

    Raises:
        ValueError: the tables do not make a collection, the optimizer has no fused form, or the
            location is not one of the device.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        tables: list[EmbeddingBagConfig],
        optimizer_type: type[torch.optim.Optimizer],
        optimizer_kwargs: dict[str, Any],
        is_weighted: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        device: torch.device | None = None,
        location: Any = None,
    ) -> None:
        super().__init__()
        check_tables(tables)
        self.configs, self.weighted = list(tables), is_weighted
        self._device = torch.device("cpu") if device is None else torch.device(device)
        self._optimizer_type, self._optimizer_kwargs = optimizer_type, optimizer_kwargs
        fused = convert_optimizer_type_and_kwargs(optimizer_type, optimizer_kwargs)
        kernel = kernel_at(location, self._device)
        self._embedding_names = embedding_names(tables)
        self._length_per_key = self._lengths_per_embedding
        self._kernels: list[BatchedFusedEmbeddingBag] = []
        if self._device.type == "meta":
            self.embedding_bags = tables_without_memory(tables)
            return
        groups: dict[tuple[PoolingType, DataType], list[ShardedEmbeddingTable]] = {}
        for table, names in zip(tables, get_embedding_names_by_table(tables), strict=True):
            whole = whole_table(table, names, kernel, weighted=is_weighted)
            groups.setdefault((table.pooling, table.data_type), []).append(whole)
        # In a list, not registered: what has names are the tables.
        self._kernels = [
            BatchedFusedEmbeddingBag(
                GroupedEmbeddingConfig(
                    data_type=data_type,
                    pooling=pooling,
                    is_weighted=is_weighted,
                    has_feature_processor=False,
                    compute_kernel=kernel,
                    embedding_tables=group,
                    fused_params=fused,
                ),
                device=self._device,
            )
            for (pooling, data_type), group in groups.items()
        ]
        held = {
            shard.name: ShardedTable(shard.name, [(shard, weight)], None, None)
            for one in self._kernels
            for shard, weight in zip(one.tables, one.parameters_by_table(), strict=True)
        }
        self.embedding_bags = nn.ModuleDict({table.name: held[table.name] for table in tables})
        self._optimizer = CombinedOptimizer(
            [("embedding_bags", one.fused_optimizer) for one in self._kernels]
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give every table its first values."""
        for kernel in self._kernels:
            kernel.init_parameters()

    @property
    def device(self) -> torch.device:
        """Where the tables are looked up."""
        return self._device

    def optimizer_type(self) -> type[torch.optim.Optimizer]:
        """The optimizer's class, as it was given."""
        return self._optimizer_type

    def optimizer_kwargs(self) -> Mapping[str, Any]:
        """The optimizer's arguments, as they were given."""
        return self._optimizer_kwargs

    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer that works in the backward pass; entries are ``embedding_bags.NAME.weight``.

        Raises:
            ValueError: the tables have no memory.
        """
        refuse_without_memory(self._device)
        return self._optimizer

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool the features of all tables; others are ignored.

        The result is ``[B, sum of D]`` float32; an empty bag gives zeros.

        Raises:
            IndexError: an id is not a row of its table (on a CPU).
            KeyError: a feature is missing.
            ValueError: the values are not int32 or int64, the collection is weighted and the
                features are not, or the tables have no memory.
        """
        refuse_without_memory(self._device)
        check_feature_names(features, self.configs)
        places = {name: place for place, name in enumerate(features.keys())}
        vectors: dict[str, Tensor] = {}
        for kernel in self._kernels:
            config = kernel.config
            names = config.feature_names()
            in_order = names == features.keys()
            own = features if in_order else features.permute([places[name] for name in names])
            pooled = kernel(own).float()
            if config.embedding_names() == self._embedding_names:
                return KeyedTensor(self._embedding_names, self._length_per_key, pooled)
            parts = torch.split(pooled, config.embedding_dims(), dim=1)
            vectors.update(zip(config.embedding_names(), parts, strict=True))
        values = torch.cat([vectors[name] for name in self._embedding_names], dim=1)
        return KeyedTensor(self._embedding_names, self._length_per_key, values)


def kernel_at(location: Any, device: torch.device) -> EmbeddingComputeKernel:
    """The kernel that keeps rows at FBGEMM's ``EmbeddingLocation``."""
    if location is None:
        return EmbeddingComputeKernel.FUSED
    if device.type == "meta":
        raise ValueError(
            f"location is {location} and device is meta; leave it out, as a plan says where rows are"
        )
    name = getattr(location, "name", str(location))
    if name not in _PLACES or (name == "HOST") != (device.type == "cpu"):
        fits = "HOST" if device.type == "cpu" else "DEVICE, MANAGED or MANAGED_CACHING"
        raise ValueError(f"location is {name} and device is {device}; give {fits}, or None")
    return _PLACES[name]


def tables_without_memory(
    tables: Sequence[EmbeddingBagConfig] | Sequence[EmbeddingConfig],
) -> nn.ModuleDict:
    """The tables on the ``meta`` device, by name, each with a ``weight`` ``[rows, D]``."""
    meta = torch.device("meta")
    return nn.ModuleDict(
        {
            table.name: nn.ParameterDict(
                {
                    "weight": torch.empty(
                        table.num_embeddings,
                        table.embedding_dim,
                        dtype=data_type_to_dtype(table.data_type),
                        device=meta,
                    )
                }
            )
            for table in tables
        }
    )


def refuse_without_memory(device: torch.device) -> None:
    """Tell a lookup that its tables have no memory.

    Raises:
        ValueError: ``device`` is ``meta``.
    """
    if device.type == "meta":
        raise ValueError(
            "the tables are on the meta device, without memory; shard the collection, or make it on "
            "cpu or cuda"
        )


def whole_table(
    table: EmbeddingBagConfig | EmbeddingConfig,
    names: list[str],
    kernel: EmbeddingComputeKernel,
    *,
    weighted: bool,
) -> ShardedEmbeddingTable:
    """The table as a kernel knows it: one shard, which is all of it."""
    return ShardedEmbeddingTable(
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        name=table.name,
        data_type=table.data_type,
        feature_names=list(table.feature_names),
        embedding_names=list(names),
        weight_init_max=table.get_weight_init_max(),
        weight_init_min=table.get_weight_init_min(),
        init_fn=table.init_fn,
        pooling=table.pooling if isinstance(table, EmbeddingBagConfig) else PoolingType.NONE,
        is_weighted=weighted,
        compute_kernel=kernel,
        local_rows=table.num_embeddings,
        local_cols=table.embedding_dim,
    )
