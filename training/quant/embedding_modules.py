"""EmbeddingBagCollection and EmbeddingCollection over quantized tables, for inference.

``torch.ao.quantization.quantize_dynamic`` makes them of the trained collections through
``from_float``; they are traced by torch.fx, and the traced graph compiles under
``torch.jit.script``.  The tables are buffers with the names that the parameters had.
"""

# Annotations are not postponed here: torch.fx hands them on to TorchScript, which needs types.

import torch

from tessera.training.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tessera.training.modules.embedding_modules import EmbeddingBagCollection as FloatBags
from tessera.training.modules.embedding_modules import EmbeddingCollection as FloatCollection
from tessera.training.modules.tables import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    common_dim,
    embedding_names,
)
from tessera.training.quant.pooled import MeanColumns, named_vectors
from tessera.training.quant.rows import DEFAULT_ROW_ALIGNMENT
from tessera.training.quant.stored_collection import QuantizedWeights, StoredCollection
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection"]


class EmbeddingBagCollection(StoredCollection[EmbeddingBagConfig], EmbeddingBagCollectionInterface):
    """The quantized form of `tessera.training.modules.embedding_modules.EmbeddingBagCollection`.

    Args:
        tables: the tables; their ``data_type`` says how they are stored.
        is_weighted: whether each id's vector is multiplied by the id's weight.
        device: where the tables live.
        output_dtype: of the pooled vectors: float32, float16 or bfloat16.
        table_name_to_quantized_weights: numbers and scales of each table; None: zeros.
        row_alignment: bytes that the length of a stored row is a multiple of.

    Raises:
        ValueError: the tables do not make a collection, or are not stored so.
    """

    holder, pooled = "embedding_bags", True

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool,  # noqa: FBT001 - as above
        device: torch.device | str,
        output_dtype: torch.dtype = torch.float32,
        table_name_to_quantized_weights: QuantizedWeights | None = None,
        row_alignment: int = DEFAULT_ROW_ALIGNMENT,
    ) -> None:
        super().__init__(
            tables,
            weighted=is_weighted,
            output_dtype=output_dtype,
            device=device,
            weights=table_name_to_quantized_weights,
            row_alignment=row_alignment,
        )
        self._embedding_names = embedding_names(tables)
        self._length_per_key = [
            table.embedding_dim for table in tables for _ in table.feature_names
        ]
        self._means = MeanColumns(tables)

    @classmethod
    def _like(
        cls, module: FloatBags, tables: list[EmbeddingBagConfig], output_dtype: torch.dtype
    ) -> "EmbeddingBagCollection":
        return cls(tables, module.is_weighted(), module.device, output_dtype)

    def _get_name(self) -> str:
        return "QuantizedEmbeddingBagCollection"

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The settings of every table, in the collection's order."""
        return self.configs

    def embedding_names(self) -> list[str]:
        """The output's keys."""
        return self._embedding_names

    def is_weighted(self) -> bool:
        """Whether ids carry weights."""
        return self.weighted

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool.

        Args:
            features: at least the features of all tables, in any order.

        Returns:
            ``[B, sum of D]`` of the output type; an empty bag gives zeros.

        Raises:
            IndexError: an id on the CPU is not a row of its table.
            KeyError: a feature is missing.
        """
        own, sums = self.looked_up(features)
        pooled = self._means.divide(sums, own.lengths())
        return KeyedTensor(self._embedding_names, self._length_per_key, pooled)


class EmbeddingCollection(StoredCollection[EmbeddingConfig], EmbeddingCollectionInterface):
    """The quantized form of `tessera.training.modules.embedding_modules.EmbeddingCollection`.

    Args:
        tables: the tables, all with the same number of columns; their ``data_type`` says how
            they are stored.
        device: where the tables live.
        need_indices: whether the output carries the ids, as weights.
        output_dtype: of the vectors: float32, float16 or bfloat16.
        table_name_to_quantized_weights: numbers and scales of each table; None: zeros.
        row_alignment: bytes that the length of a stored row is a multiple of.

    Raises:
        ValueError: the tables do not make a collection, or are not stored so.
    """

    holder, pooled = "embeddings", False

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | str,
        need_indices: bool = False,  # noqa: FBT001, FBT002 - as above
        output_dtype: torch.dtype = torch.float32,
        table_name_to_quantized_weights: QuantizedWeights | None = None,
        row_alignment: int = DEFAULT_ROW_ALIGNMENT,
    ) -> None:
        common_dim(tables)  # which refuses different ones
        super().__init__(
            tables,
            weighted=False,
            output_dtype=output_dtype,
            device=device,
            weights=table_name_to_quantized_weights,
            row_alignment=row_alignment,
        )
        self._need_indices = need_indices
        self._embedding_names = embedding_names(tables)

    @classmethod
    def _like(
        cls, module: FloatCollection, tables: list[EmbeddingConfig], output_dtype: torch.dtype
    ) -> "EmbeddingCollection":
        return cls(tables, module.device, module.need_indices(), output_dtype)

    def _get_name(self) -> str:
        return "QuantizedEmbeddingCollection"

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The settings of every table, in the collection's order."""
        return self.configs

    def need_indices(self) -> bool:
        """Whether the output carries the ids, as weights."""
        return self._need_indices

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up.

        Args:
            features: at least the features of all tables, in any order.

        Returns:
            Of each feature (or ``feature@table``) the vectors ``[N_f, D]`` of its ids, in its
            bags; the ids are the weights if they were asked for.

        Raises:
            IndexError: an id on the CPU is not a row of its table.
            KeyError: a feature is missing.
        """
        own, vectors = self.looked_up(features)
        bounds, names = own.offset_per_key(), self._embedding_names
        parts = [vectors[bounds[index] : bounds[index + 1]] for index in range(len(names))]
        return named_vectors(own, parts, names, need_indices=self._need_indices)
