"""Words of sharded embeddings: lists of features, base classes of modules and sharders.

The words of tables and groups are in `tessera.training.distributed.embedding_tables` and are
found here too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from enum import Enum, unique
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from tessera.training.distributed.embedding_tables import (
    EmbeddingAttributes,
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedConfig,
    ShardedEmbeddingTable,
    ShardedMetaConfig,
    compute_kernel_to_embedding_location,
)
from tessera.training.distributed.types import (
    CompIn,
    DistOut,
    M,
    ModuleSharder,
    Multistreamable,
    Out,
    ParameterStorage,
    QuantizedCommCodecs,
    ShardedModule,
    ShardingType,
    ShrdCtx,
)
from tessera.training.modules.embedding_configs import DataType, EmbeddingTableConfig
from tessera.training.optim.fused import FusedParams
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "BaseEmbeddingLookup",
    "BaseEmbeddingSharder",
    "BaseGroupedFeatureProcessor",
    "BaseQuantEmbeddingSharder",
    "DataType",
    "EmbeddingAttributes",
    "EmbeddingComputeKernel",
    "EmbeddingTableConfig",
    "FeatureShardingMixIn",
    "GroupedEmbeddingConfig",
    "KJTList",
    "ListOfKJTList",
    "ModuleShardingMixIn",
    "OptimType",
    "ShardedConfig",
    "ShardedEmbeddingModule",
    "ShardedEmbeddingTable",
    "ShardedMetaConfig",
    "compute_kernel_to_embedding_location",
]

F = TypeVar("F")
T = TypeVar("T")
Part = TypeVar("Part", bound=Multistreamable)


@unique
class OptimType(Enum):
    """Names of optimizers, as configs spell them."""

    SGD = "SGD"
    LARS_SGD = "LARS_SGD"
    LAMB = "LAMB"
    PARTIAL_ROWWISE_LAMB = "PARTIAL_ROWWISE_LAMB"
    ADAM = "ADAM"
    PARTIAL_ROWWISE_ADAM = "PARTIAL_ROWWISE_ADAM"
    ADAGRAD = "ADAGRAD"
    ROWWISE_ADAGRAD = "ROWWISE_ADAGRAD"
    SHAMPOO = "SHAMPOO"
    LION = "LION"


class _Listed(Multistreamable, Generic[Part]):
    """Acts as the list that `_parts` gives."""

    @abstractmethod
    def _parts(self) -> list[Part]:
        """The list."""

    def __len__(self) -> int:
        return len(self._parts())

    def __getitem__(self, key: int) -> Part:
        return self._parts()[key]

    def __setitem__(self, key: int, item: Part) -> None:
        self._parts()[key] = item

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts())

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that ``stream`` uses every tensor."""
        for part in self._parts():
            part.record_stream(stream)


class KJTList(_Listed[KeyedJaggedTensor]):
    """The input of a sharded module's lookups, one tensor per lookup.

    Args:
        features: one tensor per sharding type.
    """

    def __init__(self, features: list[KeyedJaggedTensor]) -> None:
        self.features = features

    def _parts(self) -> list[KeyedJaggedTensor]:
        return self.features


class ListOfKJTList(_Listed[KJTList]):
    """Several `KJTList`, one per sharding type, each with one tensor per device.

    Args:
        features: the lists.
    """

    def __init__(self, features: list[KJTList]) -> None:
        self.features_list = features

    def _parts(self) -> list[KJTList]:
        return self.features_list


class BaseEmbeddingLookup(ABC, nn.Module, Generic[F, T]):
    """The tables of one rank and one sharding type: features to vectors."""

    @abstractmethod
    def forward(self, sparse_features: F) -> T:
        """Look up this rank's features (local row numbers)."""


class FeatureShardingMixIn(ABC):
    """What a sharding says about its features."""

    @abstractmethod
    def feature_names(self) -> list[str]:
        """The features that it sends, in the order in which it sends them."""

    @abstractmethod
    def feature_names_per_rank(self) -> list[list[str]]:
        """The features that each rank receives."""

    def features_per_rank(self) -> list[int]:
        """How many features each rank receives."""
        return [len(names) for names in self.feature_names_per_rank()]


class ModuleShardingMixIn(ABC):
    """What a sharded module says about its shardings."""

    @property
    @abstractmethod
    def shardings(self) -> Mapping[str, FeatureShardingMixIn]:
        """The shardings by sharding type."""


class ShardedEmbeddingModule(
    ShardedModule[CompIn, DistOut, Out, ShrdCtx],
    ModuleShardingMixIn,
    Generic[CompIn, DistOut, Out, ShrdCtx],
):
    """A collection whose tables are spread over ranks.

    Inputs and outputs are each rank's own samples.  Its lookups and distributions live in plain
    lists: their parameters appear once, under the unsharded names.

    Args:
        qcomm_codecs_registry: how vectors are written for the network, by `CommOp` name.
    """

    def __init__(self, qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None) -> None:
        super().__init__(qcomm_codecs_registry)
        self._input_dists: list[nn.Module] = []
        self._lookups: list[nn.Module] = []
        self._output_dists: list[nn.Module] = []

    def prefetch(self, dist_input: KJTList, forward_stream: torch.Stream | None = None) -> None:
        """Bring the rows of a later batch into the caches of the tables that have one."""
        for lookup, features in zip(self._lookups, dist_input, strict=True):
            while isinstance(lookup, nn.parallel.DistributedDataParallel):
                lookup = lookup.module  # noqa: PLW2901 - unwrapped step by step
            prefetch = getattr(lookup, "prefetch", None)
            if prefetch is not None:
                prefetch(sparse_features=features, forward_stream=forward_stream)

    def extra_repr(self) -> str:
        """The lookups and distributions, which the module's own print would leave out."""
        parts = (
            ("lookups", self._lookups),
            ("_input_dists", self._input_dists),
            ("_output_dists", self._output_dists),
        )
        return "\n".join(
            "\n ".join([f"({name}): ", *[str(m).replace("\n", "\n ") for m in modules]])
            for name, modules in parts
            if modules
        )


class BaseGroupedFeatureProcessor(nn.Module, ABC):
    """Changes features on the rank that looks them up, before it does."""

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The same bags, with weights."""


class _SharderOfTables(ModuleSharder[M], Generic[M]):
    """What sharders of trained and of quantized collections have in common.

    Args:
        fused_params: settings of the tables' lookups.
        qcomm_codecs_registry: how vectors are written for the network, by `CommOp` name.
    """

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry=qcomm_codecs_registry)
        self._fused_params = None if fused_params is None else dict(fused_params)

    @property
    def fused_params(self) -> dict[str, Any] | None:
        """What was given."""
        return self._fused_params

    def storage_usage(
        self, tensor: Tensor, compute_device_type: str, compute_kernel: str
    ) -> dict[str, int]:
        """Bytes of a table (with its scales), by the memory that they lie in."""
        on_host = compute_device_type == "cpu" or compute_kernel in {
            EmbeddingComputeKernel.FUSED_UVM.value,
            EmbeddingComputeKernel.FUSED_UVM_CACHING.value,
            EmbeddingComputeKernel.QUANT_UVM.value,
            EmbeddingComputeKernel.QUANT_UVM_CACHING.value,
        }
        storage = ParameterStorage.DDR if on_host else ParameterStorage.HBM
        return {storage.value: tensor.element_size() * tensor.numel()}


class BaseEmbeddingSharder(_SharderOfTables[M], Generic[M]):
    """Sharder of a training collection.

    Args:
        fused_params: the tables' optimizer: keys of `tessera.training.optim.fused.FusedParams`.
        qcomm_codecs_registry: how vectors are written for the network, by `CommOp` name.

    Raises:
        ValueError: an unknown key or value.
    """

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        FusedParams.from_dict(fused_params or {})
        super().__init__(fused_params, qcomm_codecs_registry)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All of them, on every kind of device."""
        del compute_device_type
        return [
            ShardingType.DATA_PARALLEL.value,
            ShardingType.TABLE_WISE.value,
            ShardingType.COLUMN_WISE.value,
            ShardingType.TABLE_COLUMN_WISE.value,
            ShardingType.ROW_WISE.value,
            ShardingType.TABLE_ROW_WISE.value,
            ShardingType.GRID_SHARD.value,
        ]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """The kernels that a sharding type has on a kind of device."""
        kernels = [EmbeddingComputeKernel.DENSE.value]
        if sharding_type != ShardingType.DATA_PARALLEL.value:
            kernels.append(EmbeddingComputeKernel.FUSED.value)
            if compute_device_type == "cuda":
                kernels += [
                    EmbeddingComputeKernel.FUSED_UVM.value,
                    EmbeddingComputeKernel.FUSED_UVM_CACHING.value,
                ]
        return kernels


class BaseQuantEmbeddingSharder(_SharderOfTables[M], Generic[M]):
    """Sharder of a quantized collection.

    Args:
        fused_params: settings of the lookups.
        shardable_params: names of the tables that may be sharded; None: all.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        shardable_params: list[str] | None = None,
    ) -> None:
        super().__init__(fused_params)
        self._shardable_params = shardable_params

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The types of inference: whole tables, rows and columns."""
        del compute_device_type
        return [
            ShardingType.TABLE_WISE.value,
            ShardingType.ROW_WISE.value,
            ShardingType.COLUMN_WISE.value,
        ]

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """The tables' quantized rows by table name."""
        tables: dict[str, nn.Parameter] = {}
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name.endswith(".weight"):
                table = name.split(".")[-2]
                if self._shardable_params is None or table in self._shardable_params:
                    tables[table] = nn.Parameter(tensor, requires_grad=False)
        return tables

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """The kernels that a kind of device has."""
        del sharding_type
        kernels = [EmbeddingComputeKernel.QUANT.value]
        if compute_device_type == "cuda":
            kernels += [
                EmbeddingComputeKernel.QUANT_UVM.value,
                EmbeddingComputeKernel.QUANT_UVM_CACHING.value,
            ]
        return kernels
