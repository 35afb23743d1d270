"""EmbeddingBagCollection and EmbeddingCollection: lookups of many features in many tables.

These are the plain forms: one ``nn.EmbeddingBag`` or ``nn.Embedding`` per table, any torch
optimizer, any device.  `tessera.training.distributed.model_parallel.DistributedModelParallel`
swaps them for the fused and sharded forms, under the same parameter names.
"""

# Annotations are not postponed here: torch.fx hands them on to TorchScript, which needs types.

import torch
from torch import Tensor, nn

from tessera.training.modules.embedding_configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from tessera.training.modules.tables import (
    DescribesPooled,
    DescribesUnpooled,
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    check_ids,
    check_tables,
    common_dim,
    embedding_names,
    flat_names,
    get_embedding_names_by_table,
    looked_up,
    trained_dtype,
)
from tessera.training.sparse import selection
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from tessera.training.sparse.script_types import is_scripting

__all__ = [
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionInterface",
    "EmbeddingCollection",
    "EmbeddingCollectionInterface",
    "check_ids",
    "check_tables",
    "embedding_names",
    "get_embedding_names_by_table",
]


class EmbeddingBagCollection(DescribesPooled, EmbeddingBagCollectionInterface):
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
        self.weighted = is_weighted
        self.configs = list(tables)
        self._feature_names = [list(table.feature_names) for table in tables]
        self._all_features, self._by_place = flat_names(self._feature_names)
        self._embedding_names = embedding_names(tables)
        self._length_per_key = [
            table.embedding_dim for table in tables for _ in table.feature_names
        ]
        # nn.EmbeddingBag has no weighted mean; the forward divides a weighted sum.
        self._divides = [is_weighted and table.pooling is PoolingType.MEAN for table in tables]
        self.embedding_bags = nn.ModuleDict()
        for table, divides in zip(tables, self._divides, strict=True):
            self.embedding_bags[table.name] = nn.EmbeddingBag(
                table.num_embeddings,
                table.embedding_dim,
                mode="mean" if table.pooling is PoolingType.MEAN and not divides else "sum",
                include_last_offset=True,
                _weight=_new_weight(table, device),
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give every table its first values."""
        for table in self.configs:
            _fill(self.embedding_bags[table.name], table)

    @property
    def device(self) -> torch.device:
        """Where the tables live."""
        return next(self.embedding_bags.parameters()).device

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool the features of all tables; others are ignored.

        The result is ``[B, sum of D]`` float32; an empty bag gives zeros.  A batch that varies per
        key needs inverse indices.

        Raises:
            IndexError: an id is not a row of its table.
            KeyError: a feature is missing.
            ValueError: the values are not int32 or int64, the collection is weighted and the
                features are not, or the batch varies per key without inverse indices.
        """
        if is_scripting():
            return self._look_up(features)
        return self._named(features)

    @torch.jit.unused
    def _named(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """See `looked_up`."""
        return looked_up(self._look_up, features, self.configs)

    def _look_up(self, features: KeyedJaggedTensor) -> KeyedTensor:
        bags = selection.bags_of(features, self._all_features, self._by_place)
        pooled: list[Tensor] = []
        for index, table in enumerate(self.embedding_bags.values()):
            for _ in self._feature_names[index]:
                bag = bags[len(pooled)]
                weights = bag.weights() if self.weighted else None
                vectors = table(bag.values().long(), bag.offsets().long(), weights).float()
                if self._divides[index]:
                    vectors = vectors / bag.lengths().clamp(min=1).unsqueeze(1)
                pooled.append(vectors)
        if is_scripting() or isinstance(features, KeyedJaggedTensor):
            pooled = _expand_pooled(pooled, features, self._feature_names)
        return KeyedTensor(self._embedding_names, self._length_per_key, torch.cat(pooled, dim=1))


class EmbeddingCollection(DescribesUnpooled, EmbeddingCollectionInterface):
    """Looks up one vector per id of every feature, without pooling.

    Args:
        tables: the tables, all with the same number of columns.
        device: where the tables live; ``torch.device("meta")`` makes them without memory.
        need_indices: whether the output carries the ids, as weights.

    Raises:
        ValueError: the tables do not make a collection.
    """

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
    ) -> None:
        super().__init__()
        check_tables(tables)
        common_dim(tables)  # which refuses different ones
        self._need_indices = need_indices
        self.configs = list(tables)
        self._feature_names = [list(table.feature_names) for table in tables]
        self._all_features, self._by_place = flat_names(self._feature_names)
        self._embedding_names_by_table = get_embedding_names_by_table(tables)
        self.embeddings = nn.ModuleDict()
        for table in tables:
            self.embeddings[table.name] = nn.Embedding(
                table.num_embeddings, table.embedding_dim, _weight=_new_weight(table, device)
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give every table its first values."""
        for table in self.configs:
            _fill(self.embeddings[table.name], table)

    @property
    def device(self) -> torch.device:
        """Where the tables live."""
        return next(self.embeddings.parameters()).device

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up the features of all tables; others are ignored.

        Of each feature (or ``feature@table``) the result has the vectors ``[N_f, D]`` float32 of its
        ids, in its bags; the ids are the weights if they were asked for.

        Raises:
            IndexError: an id is not a row of its table.
            KeyError: a feature is missing.
            ValueError: the values are not int32 or int64.
        """
        if is_scripting():
            return self._look_up(features)
        return self._named(features)

    @torch.jit.unused
    def _named(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """See `looked_up`."""
        return looked_up(self._look_up, features, self.configs)

    def _look_up(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        bags = selection.bags_of(features, self._all_features, self._by_place)
        looked_up: dict[str, JaggedTensor] = {}
        for index, table in enumerate(self.embeddings.values()):
            for name in self._embedding_names_by_table[index]:
                bag = bags[len(looked_up)]
                ids = bag.values().long()
                looked_up[name] = JaggedTensor(
                    table(ids).float(),
                    ids if self._need_indices else None,
                    bag.lengths(),
                    bag.offsets_or_none(),
                    validate=False,
                )
        return looked_up


def _expand_pooled(
    pooled: list[Tensor], features: KeyedJaggedTensor, feature_names: list[list[str]]
) -> list[Tensor]:
    """The vector of the bag that each sample uses, by the features' inverse indices.

    Of each feature of each table, ``pooled`` has ``[S_f, D]`` and the result ``[B, D]``; it is
    ``pooled`` itself where every key has ``B`` bags.

    Raises:
        ValueError: the batch varies per key and there are no inverse indices.
    """
    if not features.variable_stride_per_key():
        return pooled
    inverse = features.inverse_indices_or_none()
    if inverse is None:
        raise ValueError(
            "the features have different numbers of bags; give inverse_indices= to the "
            "KeyedJaggedTensor, which say which bag each sample uses"
        )
    keys, places = inverse
    of_key = {key: places[index] for index, key in enumerate(keys)}
    expanded: list[Tensor] = []
    for names in feature_names:
        for name in names:
            expanded.append(pooled[len(expanded)].index_select(0, of_key[name]))
    return expanded


def _new_weight(
    table: EmbeddingBagConfig | EmbeddingConfig, device: torch.device | str | None
) -> Tensor:
    shape = (table.num_embeddings, table.embedding_dim)
    return torch.empty(shape, dtype=trained_dtype(table), device=device)


def _fill(module: nn.Module, table: EmbeddingBagConfig | EmbeddingConfig) -> None:
    weight = module.weight
    assert isinstance(weight, Tensor)
    if weight.device.type != "meta":
        with torch.no_grad():
            table.init_weights(weight)
