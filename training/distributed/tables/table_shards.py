"""Tables as a rank holds them, and how they are grouped into operators.

A table of the user's (`EmbeddingTableConfig`) becomes one `ShardedEmbeddingTable` per shard; the
shards of a rank that one operator can serve become one `GroupedEmbeddingConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique
from typing import Any

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata

from tessera.training.modules.embedding_configs import (
    DataType,
    EmbeddingTableConfig,
    PoolingType,
)


@unique
class EmbeddingComputeKernel(Enum):
    """How the shards of a rank are stored and looked up.

    ``dense``: ordinary parameters with gradients.  ``fused``: the optimizer works in the backward
    pass.  ``fused_uvm``: the same with rows in host memory that the GPU reads directly.
    ``fused_uvm_caching``: the same behind a cache of rows in GPU memory.  ``quant*``: read-only
    quantized rows.
    """

    DENSE = "dense"
    FUSED = "fused"
    FUSED_UVM = "fused_uvm"
    FUSED_UVM_CACHING = "fused_uvm_caching"
    QUANT = "quant"
    QUANT_UVM = "quant_uvm"
    QUANT_UVM_CACHING = "quant_uvm_caching"
    # TorchRec's names of kernels that are not here; a plan with one is refused when it is followed.
    KEY_VALUE = "key_value"
    CUSTOMIZED_KERNEL = "customized_kernel"
    SSD_VIRTUAL_TABLE = "ssd_virtual_table"
    DRAM_VIRTUAL_TABLE = "dram_virtual_table"
    DRAM_SSD_VIRTUAL_TABLE = "dram_ssd_virtual_table"
    FUSED_TRITON = "fused_triton"


NOT_HERE = frozenset(
    {
        EmbeddingComputeKernel.KEY_VALUE,
        EmbeddingComputeKernel.CUSTOMIZED_KERNEL,
        EmbeddingComputeKernel.SSD_VIRTUAL_TABLE,
        EmbeddingComputeKernel.DRAM_VIRTUAL_TABLE,
        EmbeddingComputeKernel.DRAM_SSD_VIRTUAL_TABLE,
        EmbeddingComputeKernel.FUSED_TRITON,
    }
)
"""Kernels that are names alone."""


def kernel_named(table: str, name: str) -> EmbeddingComputeKernel:
    """The kernel that a plan names for a table.

    Raises:
        ValueError: it is not here.
    """
    known = {kernel.value: kernel for kernel in EmbeddingComputeKernel}
    if name not in known or known[name] in NOT_HERE:
        here = ", ".join(
            kernel.value for kernel in EmbeddingComputeKernel if kernel not in NOT_HERE
        )
        raise ValueError(
            f"table {table!r}: compute_kernel {name!r} is not here; give one of {here}"
        )
    return known[name]


def compute_kernel_to_embedding_location(compute_kernel: EmbeddingComputeKernel) -> Any:
    """Where FBGEMM keeps the rows of a kernel: its ``EmbeddingLocation``.

    Raises:
        ImportError: FBGEMM is not installed.
    """
    # FBGEMM takes seconds to import and is asked for by name only here.
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (  # noqa: PLC0415
        EmbeddingLocation,
    )

    storage = compute_kernel.value.partition("_")[2]
    places = {"uvm": EmbeddingLocation.MANAGED, "uvm_caching": EmbeddingLocation.MANAGED_CACHING}
    return places.get(storage, EmbeddingLocation.DEVICE)


@dataclass
class ShardedConfig:
    """Describes the part of a table that one shard is.

    Attributes:
        local_rows: rows of the shard.
        local_cols: columns of the shard.
    """

    local_rows: int = 0
    local_cols: int = 0


@dataclass
class ShardedMetaConfig(ShardedConfig):
    """The same, with the shard's place in the table.

    Attributes:
        local_metadata: this shard's offsets, sizes and placement; None for a whole copy
            (data parallel).
        global_metadata: all shards of the table; None likewise.
    """

    local_metadata: ShardMetadata | None = None
    global_metadata: ShardedTensorMetadata | None = None


@dataclass
class EmbeddingAttributes:
    """Says with which kernel a table is computed.

    Attributes:
        compute_kernel: see `EmbeddingComputeKernel`.
    """

    compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.DENSE


@dataclass
class ShardedEmbeddingTable(ShardedMetaConfig, EmbeddingAttributes, EmbeddingTableConfig):
    """One shard of a table, as the rank that holds it sees it.

    ``num_embeddings`` and ``embedding_dim`` are the whole table's, ``local_rows`` and
    ``local_cols`` the shard's.

    Attributes:
        fused_params: the optimizer and other settings of the fused kernels.
    """

    fused_params: dict[str, Any] | None = None


@dataclass
class GroupedEmbeddingConfig:
    """Shards that one operator serves: alike in type, pooling, weights and kernel.

    Attributes:
        embedding_tables: the shards; features are taken in their order.
        fused_params: of all of them.
    """

    data_type: DataType
    pooling: PoolingType
    is_weighted: bool
    has_feature_processor: bool
    compute_kernel: EmbeddingComputeKernel
    embedding_tables: list[ShardedEmbeddingTable]
    fused_params: dict[str, Any] | None = None

    def feature_hash_sizes(self) -> list[int]:
        """Return, per feature, the number of rows of its whole table."""
        return [t.num_embeddings for t in self.embedding_tables for _ in t.feature_names]

    def num_features(self) -> int:
        """Return how many features are looked up."""
        return sum(table.num_features() for table in self.embedding_tables)

    def dim_sum(self) -> int:
        """Return the number of columns of the pooled output."""
        return sum(table.num_features() * table.local_cols for table in self.embedding_tables)

    def table_names(self) -> list[str]:
        """Return the name of each shard's table."""
        return [table.name for table in self.embedding_tables]

    def feature_names(self) -> list[str]:
        """The features, in order; a name comes once per table that serves it."""
        return [name for table in self.embedding_tables for name in table.feature_names]

    def embedding_dims(self) -> list[int]:
        """Return, per feature, its number of columns in the output."""
        return [t.local_cols for t in self.embedding_tables for _ in t.feature_names]

    def embedding_names(self) -> list[str]:
        """Return, per feature, its name in the output."""
        return [name for table in self.embedding_tables for name in table.embedding_names]

    def embedding_shard_metadata(self) -> list[ShardMetadata | None]:
        """Return, per feature, the place of its shard in the table."""
        return [t.local_metadata for t in self.embedding_tables for _ in t.feature_names]
