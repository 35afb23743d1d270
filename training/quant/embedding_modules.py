"""EmbeddingBagCollection and EmbeddingCollection over quantized tables, for inference.

``torch.ao.quantization.quantize_dynamic`` makes them of the trained collections through
``from_float``; they are traced by torch.fx, and the traced graph compiles under
``torch.jit.script``.  The tables are buffers with the names that the parameters had.
"""

# Annotations are not postponed here: torch.fx hands them on to TorchScript, which needs types.

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tessera.training.modules.embedding_configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from tessera.training.modules.embedding_modules import EmbeddingBagCollection as FloatBags
from tessera.training.modules.embedding_modules import EmbeddingCollection as FloatCollection
from tessera.training.modules.tables import (
    DescribesPooled,
    DescribesUnpooled,
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    common_dim,
    embedding_names,
)
from tessera.training.quant.rows import DEFAULT_ROW_ALIGNMENT
from tessera.training.quant.stored_collection import QuantizedWeights, StoredCollection
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection"]


class MeanColumns:
    """Divides the columns of averaged features by their bags' sizes.

    The operator adds up everywhere: sums of different devices can be added, and averages not.

    Args:
        tables: the tables; features are in their order.
    """

    def __init__(self, tables: Sequence[EmbeddingBagConfig]) -> None:
        features = [table for table in tables for _ in table.feature_names]
        self._averaged = [table.pooling is PoolingType.MEAN for table in features]
        self._columns = [table.embedding_dim for table in features]
        self._starts = list(accumulate(self._columns, initial=0))[:-1]

    @property
    def needed(self) -> bool:
        """Whether any feature is averaged."""
        return any(self._averaged)

    def divide(self, sums: Tensor, lengths: Tensor) -> Tensor:
        """``sums`` ``[B, sum of D]`` divided where they are averages; ``lengths`` ``[T * B]``."""
        if not self.needed:
            return sums
        sizes_TB = lengths.view(len(self._averaged), -1).clamp(min=1)
        divided = []
        for index, (start, width) in enumerate(zip(self._starts, self._columns, strict=True)):
            column = sums.narrow(1, start, width)
            if self._averaged[index]:
                column = (column / sizes_TB[index].unsqueeze(1)).to(column.dtype)
            divided.append(column)
        return torch.cat(divided, dim=1)


def named_vectors(
    features: KeyedJaggedTensor,
    vectors: Sequence[Tensor],
    names: Sequence[str],
    *,
    need_indices: bool,
) -> dict[str, JaggedTensor]:
    """The vectors ``[N_f, D]`` of each feature that was looked up, in its bags, by name."""
    ids, bags = features.offset_per_key(), features.lengths_offset_per_key()
    values, lengths = features.values(), features.lengths()
    return {
        name: JaggedTensor(
            vectors[index],
            values[ids[index] : ids[index + 1]] if need_indices else None,
            lengths[bags[index] : bags[index + 1]],
            validate=False,
        )
        for index, name in enumerate(names)
    }


class EmbeddingBagCollection(
    DescribesPooled, StoredCollection[EmbeddingBagConfig], EmbeddingBagCollectionInterface
):
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


class EmbeddingCollection(
    DescribesUnpooled, StoredCollection[EmbeddingConfig], EmbeddingCollectionInterface
):
    """The quantized form of `tessera.training.modules.embedding_modules.EmbeddingCollection`.

    Its arguments are those of `EmbeddingBagCollection`, but that all tables have the same number
    of columns, and:

    Args:
        need_indices: whether the output carries the ids, as weights.
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
