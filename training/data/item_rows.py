"""Batches with rows of other items: items alone behind the rows, and rows with another item.

Shapes: ``B`` rows of a batch, ``E`` rows behind them, ``D`` dense columns, ``N`` ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tessera.training.data.batch import Batch, make_batch
from tessera.training.data.catalogue import Catalogue, Ids, ItemBags, bags_of
from tessera.training.data.columns import FeatureColumns


def with_items(batch: Batch, catalogue: Catalogue, places: Ids) -> Batch:
    """The batch with the features of ``E`` more rows, which have those of these items alone.

    Labels, weights and row numbers stay those of the ``B`` rows.
    """
    dense = np.concatenate([batch.dense_features.numpy(), catalogue.dense[places]])
    parts = []
    keys = batch.sparse_features.keys()
    for name in keys:
        own = bags_of(batch, name)
        more = catalogue.bags[name].at(places) if name in catalogue.bags else _none(len(places))
        parts.append(ItemBags.joined([own, _like(more, own)]))
    joined = _batch(keys, dense, parts, np.zeros(len(dense), np.float32))
    return dataclasses.replace(
        batch, dense_features=joined.dense_features, sparse_features=joined.sparse_features
    )


def items_alone(columns: FeatureColumns, catalogue: Catalogue, places: Ids) -> Batch:
    """Rows that have the features of these items alone; their labels are 0."""
    weighted = any(column.kind == "weighted_list" for column in columns.sparse)
    parts = []
    for name in columns.sparse_names:
        own = catalogue.bags[name].at(places) if name in catalogue.bags else _none(len(places))
        ones = np.ones(len(own.values), np.float32)
        weights = ones if own.weights is None else own.weights
        parts.append(dataclasses.replace(own, weights=weights if weighted else None))
    labels = np.zeros(len(places), np.float32)
    return _batch(columns.sparse_names, catalogue.dense[places], parts, labels)


def _none(rows: int) -> ItemBags:
    zeros = np.zeros(rows, np.int64)
    return ItemBags(np.empty(0, np.int64), zeros, zeros.astype(np.int32), None)


def _like(bags: ItemBags, other: ItemBags) -> ItemBags:
    """The bags with weights of 1, where the others have weights and they have none."""
    if other.weights is None or bags.weights is not None:
        return bags
    return dataclasses.replace(bags, weights=np.ones(len(bags.values), np.float32))


def _batch(
    keys: Sequence[str],
    dense: npt.NDArray[np.float32],
    parts: list[ItemBags],
    labels: npt.NDArray[np.float32],
) -> Batch:
    weights = [part.weights for part in parts if part.weights is not None]
    return make_batch(
        dense=dense,
        keys=keys,
        lengths=np.concatenate([part.lengths for part in parts]),
        values=np.concatenate([part.values for part in parts]),
        labels=labels,
        value_weights=np.concatenate(weights) if weights else None,
    )
