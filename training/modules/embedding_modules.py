"""EmbeddingBagCollection: pooled lookups of many features in many tables.

This is the plain form: one ``nn.EmbeddingBag`` per table, any torch optimizer, any device.
`tessera.training.distributed.model_parallel.DistributedModelParallel` swaps it for the fused
form, which is what makes training fast, under the same parameter names.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from tessera.training.sparse.checks import check_id_dtype, is_traced
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor


def embedding_names(tables: list[EmbeddingBagConfig]) -> list[str]:
    """The keys of a collection's output, tables in order and features within a table in order.

    A feature's vector is called like the feature; a feature that several tables serve has one
    vector from each, called ``feature@table``.
    """
    served = [feature for table in tables for feature in table.feature_names]
    return [
        feature if served.count(feature) == 1 else f"{feature}@{table.name}"
        for table in tables
        for feature in table.feature_names
    ]


def check_tables(tables: list[EmbeddingBagConfig]) -> None:
    """Check the tables of one collection.

    Raises:
        UserError: a name is missing or given twice, a table serves no feature, or a data type
            that training does not store.
    """
    seen: set[str] = set()
    for table in tables:
        if not table.name or "." in table.name:
            raise UserError(
                f"table name {table.name!r}: give a name without a dot (it becomes a part of the "
                "parameter's name)"
            )
        if hasattr(nn.ModuleDict(), table.name):
            raise UserError(
                f"table name {table.name!r} is a word that torch's modules use themselves; give "
                "another, such as one that ends in _table"
            )
        if table.name in seen:
            raise UserError(f"two tables are called {table.name!r}; names are unique")
        seen.add(table.name)
        if not table.feature_names:
            raise UserError(f"table {table.name!r} has no feature_names; give at least one")
        if len(set(table.feature_names)) != len(table.feature_names):
            raise UserError(f"table {table.name!r} lists a feature twice: {table.feature_names}")
        if table.data_type is not DataType.FP32:
            raise UserError(
                f"table {table.name!r}: data_type is {table.data_type.value}; tables are trained "
                "as FP32 and packaged as something else"
            )


def check_ids(feature: str, table: EmbeddingBagConfig, ids: Tensor) -> None:
    """Refuse ids that are not rows of ``table``.  One pass over ``ids`` ``[N]``.

    Raises:
        IndexError: naming feature, id, table and its rows.
    """
    if ids.numel() == 0:
        return
    lowest, highest = (int(bound) for bound in torch.aminmax(ids))
    if lowest < 0 or highest >= table.num_embeddings:
        raise IndexError(
            f"feature {feature!r} has id {lowest if lowest < 0 else highest}, but table "
            f"{table.name!r} has rows 0 to {table.num_embeddings - 1}; hash or clamp ids first "
            "(tessera.training.modules.hashing)"
        )


class EmbeddingBagCollection(nn.Module):
    """Looks up and pools the bags of every feature in its table.

    Args:
        tables: the tables; their order, and the order of ``feature_names`` within each, is the
            order of the output's keys.
        is_weighted: whether each id's vector is multiplied by the id's weight.  A mean still
            divides by the number of ids.
        device: where the tables live; ``torch.device("meta")`` makes them without memory.

    Ids on the CPU are checked against the table's rows before the lookup (one pass over the
    ids, a few percent of the lookup's time); on an accelerator the device's own check applies.

    Raises:
        ValueError: the tables do not make a collection.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_tables(tables)
        self._is_weighted = is_weighted
        self._configs = list(tables)
        self._embedding_names = embedding_names(tables)
        self._length_per_key = [
            table.embedding_dim for table in tables for _ in table.feature_names
        ]
        self.embedding_bags = nn.ModuleDict()
        for table in tables:
            weights = torch.empty(table.num_embeddings, table.embedding_dim, device=device)
            # nn.EmbeddingBag has no weighted mean; the forward divides a weighted sum.
            mean = table.pooling is PoolingType.MEAN and not is_weighted
            self.embedding_bags[table.name] = nn.EmbeddingBag(
                table.num_embeddings,
                table.embedding_dim,
                mode="mean" if mean else "sum",
                include_last_offset=True,
                _weight=weights,
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give every table its first values."""
        for table in self._configs:
            weight = self.embedding_bags[table.name].weight
            assert isinstance(weight, Tensor)
            if weight.device.type != "meta":
                with torch.no_grad():
                    table.init_weights(weight)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables."""
        return self._configs

    def embedding_names(self) -> list[str]:
        """The output's keys."""
        return self._embedding_names

    def is_weighted(self) -> bool:
        """Whether ids carry weights."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """Where the tables live."""
        return next(self.embedding_bags.parameters()).device

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool.

        Args:
            features: at least the features of all tables; others are ignored.

        Returns:
            ``[B, sum of D]`` float32; an empty bag gives zeros.

        Raises:
            IndexError: an id is not a row of its table.
            KeyError: a feature is missing.
            ValueError: the values are not int32 or int64, or the collection is weighted and the
                features are not.
        """
        check_id_dtype(features.values())
        bags = features.to_dict()
        pooled = []
        for table in self._configs:
            embedding_bag = self.embedding_bags[table.name]
            for feature in table.feature_names:
                bag = bags[feature]
                ids = bag.values()
                if not is_traced(ids) and ids.device.type == "cpu":
                    check_ids(feature, table, ids)
                vectors = embedding_bag(
                    ids.long(),
                    bag.offsets().long(),
                    bag.weights() if self._is_weighted else None,
                )
                if self._is_weighted and table.pooling is PoolingType.MEAN:
                    vectors = vectors / bag.lengths().clamp(min=1).unsqueeze(1)
                pooled.append(vectors)
        return KeyedTensor(
            keys=self._embedding_names,
            length_per_key=self._length_per_key,
            values=torch.cat(pooled, dim=1),
        )
