"""An unpooled collection of one process that its backward pass updates, and the exchange of plain collections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tessera.training.distributed.collections.fused import (
    FusedEmbeddingBagCollection,
    kernel_at,
    refuse_without_memory,
    tables_without_memory,
    whole_table,
)
from tessera.training.distributed.tables.batched_kernels import BatchedFusedEmbedding
from tessera.training.distributed.tables.table_module import ShardedTable
from tessera.training.distributed.tables.table_shards import (
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from tessera.training.modules.embedding_configs import DataType, EmbeddingConfig, PoolingType
from tessera.training.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.training.modules.tables import (
    DescribesUnpooled,
    EmbeddingCollectionInterface,
    check_feature_names,
    check_tables,
    common_dim,
    get_embedding_names_by_table,
)
from tessera.training.optim.apply_optimizer_in_backward import convert_optimizer_type_and_kwargs
from tessera.training.optim.combined_optimizer import CombinedOptimizer
from tessera.training.optim.keyed_optimizer import KeyedOptimizer
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


class FusedEmbeddingCollection(DescribesUnpooled, EmbeddingCollectionInterface):
    """Looks up as `EmbeddingCollection`, and updates its tables in the backward pass.

    Parameters and state dicts have the names of the plain collection, ``embeddings.NAME.weight``.
    `DistributedModelParallel` shards it over ranks.

    Args:
        tables: the tables, all with the same number of columns.
        optimizer_type: an optimizer that has a fused form, of torch's or of
            `tessera.training.optim.optimizers`.
        optimizer_kwargs: for its constructor.
        device: the CPU (None), a CUDA device, or ``torch.device("meta")``, which makes tables without
            memory: they may be sharded, and not be looked up.
        need_indices: whether the output carries the ids, as weights.
        location: FBGEMM's ``EmbeddingLocation`` of the rows; None: on ``device``.

    Raises:
        ValueError: the tables do not make a collection, the optimizer has no fused form, or the
            location is not one of the device.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        tables: list[EmbeddingConfig],
        optimizer_type: type[torch.optim.Optimizer],
        optimizer_kwargs: dict[str, Any],
        device: torch.device | None = None,
        need_indices: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        location: Any = None,
    ) -> None:
        super().__init__()
        check_tables(tables)
        common_dim(tables)  # which refuses different ones
        self._device = torch.device("cpu") if device is None else torch.device(device)
        self.configs, self._need_indices = list(tables), need_indices
        self._embedding_names_by_table = get_embedding_names_by_table(tables)
        self._optimizer_type, self._optimizer_kwargs = optimizer_type, optimizer_kwargs
        fused = convert_optimizer_type_and_kwargs(optimizer_type, optimizer_kwargs)
        kernel = kernel_at(location, self._device)
        self._kernels: list[BatchedFusedEmbedding] = []
        if self._device.type == "meta":
            self.embeddings = tables_without_memory(tables)
            return
        groups: dict[DataType, list[ShardedEmbeddingTable]] = {}
        for table, names in zip(tables, self._embedding_names_by_table, strict=True):
            whole = whole_table(table, names, kernel, weighted=False)
            groups.setdefault(table.data_type, []).append(whole)
        # In a list, not registered: what has names are the tables.
        self._kernels = [
            BatchedFusedEmbedding(
                GroupedEmbeddingConfig(
                    data_type=data_type,
                    pooling=PoolingType.NONE,
                    is_weighted=False,
                    has_feature_processor=False,
                    compute_kernel=kernel,
                    embedding_tables=group,
                    fused_params=fused,
                ),
                device=self._device,
            )
            for data_type, group in groups.items()
        ]
        held = {
            shard.name: ShardedTable(shard.name, [(shard, weight)], None, None)
            for one in self._kernels
            for shard, weight in zip(one.tables, one.parameters_by_table(), strict=True)
        }
        self.embeddings = nn.ModuleDict({table.name: held[table.name] for table in tables})
        self._optimizer = CombinedOptimizer(
            [("embeddings", one.fused_optimizer) for one in self._kernels]
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
        """The optimizer that works in the backward pass; entries are ``embeddings.NAME.weight``.

        Raises:
            ValueError: the tables have no memory.
        """
        refuse_without_memory(self._device)
        return self._optimizer

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up the features of all tables; others are ignored.

        Of each feature (or ``feature@table``) the result has the vectors ``[N_f, D]`` float32 of its
        ids, in its bags; the ids are the weights if they were asked for.

        Raises:
            IndexError: an id is not a row of its table (on a CPU).
            KeyError: a feature is missing.
            ValueError: the values are not int32 or int64, or the tables have no memory.
        """
        refuse_without_memory(self._device)
        check_feature_names(features, self.configs)
        places = {name: place for place, name in enumerate(features.keys())}
        looked_up: dict[str, JaggedTensor] = {}
        for kernel in self._kernels:
            config = kernel.config
            names = config.feature_names()
            own = features.permute([places[name] for name in names])
            vectors = torch.split(kernel(own).float(), own.length_per_key())
            # In the order of the kernel's features: one may be there for several tables.
            lengths = torch.split(own.lengths(), own.stride_per_key())
            ids = torch.split(own.values(), own.length_per_key())
            for place, name in enumerate(config.embedding_names()):
                looked_up[name] = JaggedTensor(
                    vectors[place],
                    ids[place] if self._need_indices else None,
                    lengths[place],
                    validate=False,
                )
        return {name: looked_up[name] for names in self._embedding_names_by_table for name in names}


def fuse_embedding_optimizer(
    model: nn.Module,
    optimizer_type: type[torch.optim.Optimizer],
    optimizer_kwargs: dict[str, Any],
    device: torch.device,
    location: Any = None,
) -> nn.Module:
    """Put fused collections, with new first values, in the place of a model's plain ones.

    Args:
        model: changed in place, unless it is a collection itself.
        optimizer_type: see `FusedEmbeddingBagCollection`.
        optimizer_kwargs: for its constructor.
        device: the CPU or a CUDA device.
        location: FBGEMM's ``EmbeddingLocation`` of the rows; None: on ``device``.

    Returns:
        The model, or the fused collection that takes its place.
    """
    if isinstance(model, EmbeddingBagCollection):
        return FusedEmbeddingBagCollection(
            model.embedding_bag_configs(),
            optimizer_type,
            optimizer_kwargs,
            is_weighted=model.is_weighted(),
            device=device,
            location=location,
        )
    if isinstance(model, EmbeddingCollection):
        return FusedEmbeddingCollection(
            model.embedding_configs(),
            optimizer_type,
            optimizer_kwargs,
            device=device,
            need_indices=model.need_indices(),
            location=location,
        )
    for name, child in list(model.named_children()):
        fused = fuse_embedding_optimizer(child, optimizer_type, optimizer_kwargs, device, location)
        if fused is not child:
            setattr(model, name, fused)
    return model
