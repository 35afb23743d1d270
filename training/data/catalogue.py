"""`Catalogue`: every item of the training rows once, with its features and how often it occurs.

Shapes: ``I`` items, ``n`` rows, ``D`` dense columns of the data, ``S`` sparse features of side item.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from tessera.errors import UserError
from tessera.training.data.bags import bag_places
from tessera.training.data.batch import Batch
from tessera.training.data.columns import FeatureColumns
from tessera.training.data.dataset import View
from tessera.training.data.loader import BatchLoader

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_BATCH_ROWS = 1 << 15


@dataclass(frozen=True)
class ItemBags:
    """One sparse feature of the items.

    Attributes:
        values: ids of all items, one item after the other.
        starts: ``[I]``: where an item's ids begin.
        lengths: ``[I]`` int32.
        weights: of the ids, if they have any.
    """

    values: Ids
    starts: Ids
    lengths: npt.NDArray[np.int32]
    weights: Floats | None

    def at(self, places: Ids) -> ItemBags:
        """The bags of these items, in this order."""
        starts, lengths = self.starts[places], self.lengths[places]
        chosen = bag_places(starts, lengths)
        ends = np.cumsum(lengths, dtype=np.int64)
        weights = None if self.weights is None else self.weights[chosen]
        return ItemBags(self.values[chosen], ends - lengths, lengths, weights)

    @staticmethod
    def joined(parts: list[ItemBags]) -> ItemBags:
        """The items of all parts, one part after the other."""
        lengths = np.concatenate([part.lengths for part in parts])
        ends = np.cumsum(lengths, dtype=np.int64)
        weights = [part.weights for part in parts if part.weights is not None]
        values = np.concatenate([part.values for part in parts])
        return ItemBags(
            values, ends - lengths, lengths, np.concatenate(weights) if weights else None
        )


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """The different items of some rows, in the order of their ids.

    An item's features are those of the last row that has it.

    Attributes:
        ids: ``[I]`` the items' ids as the data has them, ascending.
        counts: ``[I]`` rows with this item.
        dense: ``[I, D]``; NaN in columns of another side.
        bags: by sparse feature of side item.
        known: who has which item: by row of the data with both, the user's id and the item's place,
            sorted by user; None where the data has no ``user_id``.
    """

    ids: Ids
    counts: Ids
    dense: Floats
    bags: Mapping[str, ItemBags]
    known: tuple[Ids, Ids] | None

    def __len__(self) -> int:
        return len(self.ids)

    def places(self, ids: Ids) -> Ids:
        """Where these ids stand; -1 for one that is not an item."""
        found = np.searchsorted(self.ids, ids)
        found = np.minimum(found, len(self.ids) - 1)
        places: Ids = np.where(self.ids[found] == ids, found, -1)
        return places

    def items_of(self, users: Ids) -> tuple[Ids, Ids]:
        """Where each user's items begin in ``known[1]`` and how many they are, both ``[n]``."""
        assert self.known is not None, "the data has no user_id"
        starts = np.searchsorted(self.known[0], users, side="left")
        return starts, np.searchsorted(self.known[0], users, side="right") - starts


def item_features(columns: FeatureColumns) -> tuple[list[int], list[str]]:
    """The places of the dense columns of side item, and the sparse features of that side."""
    dense = [place for place, column in enumerate(columns.dense) if column.side == "item"]
    return dense, [column.name for column in columns.sparse if column.side == "item"]


def single_ids(batch: Batch, feature: str) -> Ids:
    """``[B]``: the id of a feature that has one in every row.

    Raises:
        UserError: a row has none.
    """
    own = batch.sparse_features[feature]
    values: Ids = own.values().numpy()
    if len(values) != batch.size:
        missing = int((own.lengths().numpy() == 0).sum())
        raise UserError(
            f"the column {feature!r} has no id in {missing} of {batch.size} rows of a batch; every row"
            " needs one, so leave such rows out of the data"
        )
    return values


def collect(columns: FeatureColumns, view: View, *, progress: bool) -> Catalogue:
    """The items of ``view``, in one pass over its rows; memory grows with the items.

    With a ``user_id`` it also grows by 16 bytes per row.  ``progress`` shows a bar on a terminal.

    Raises:
        UserError: the data declares no ``item_id``, that is not of side item, or a row has no id.
    """
    key = required_item_id(columns)
    loader = BatchLoader(view, batch_size=_BATCH_ROWS, shuffle=False, seed=0)
    with tqdm(
        total=len(view),
        unit=" rows",
        unit_scale=True,
        desc="Collecting items",
        disable=None if progress else True,  # None: only on a terminal
    ) as bar:

        def batches() -> Iterable[Batch]:
            for batch in loader.epoch(0):
                yield batch
                bar.update(batch.size)

        return _collected(columns, key, batches())


def required_item_id(columns: FeatureColumns) -> str:
    """The data's ``item_id``.

    Raises:
        UserError: it has none, or that column is not of side item.
    """
    of_item = [
        column.name
        for column in columns.sparse
        if column.kind == "categorical" and column.side == "item"
    ]
    if columns.item_id is None:
        raise UserError(
            "data.item_id is missing: say which column is the item's id"
            f" ({' or '.join(of_item) or 'of kind categorical and side item'})"
        )
    if columns.item_id not in of_item:
        raise UserError(
            f"data.item_id={columns.item_id!r}: the column is not of side item; give it side: item"
        )
    return columns.item_id


def _collected(columns: FeatureColumns, key: str, batches: Iterable[Batch]) -> Catalogue:
    dense_places, sparse = item_features(columns)
    ids, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    dense = np.empty((0, len(columns.dense)), np.float32)
    bags: dict[str, ItemBags] = {}
    users: list[Ids] = []
    items: list[Ids] = []
    for batch in batches:
        of_row = single_ids(batch, key)
        users += [] if columns.user_id is None else [single_ids(batch, columns.user_id)]
        items.append(of_row)
        # The last row of each item: the first one from behind.
        fresh, from_behind, times = np.unique(of_row[::-1], return_index=True, return_counts=True)
        last = len(of_row) - 1 - from_behind
        own = np.full((len(fresh), len(columns.dense)), np.nan, np.float32)
        own[:, dense_places] = batch.dense_features.numpy()[last][:, dense_places]
        parts = {name: bags_of(batch, name).at(last) for name in sparse}
        merged, place = np.unique(np.concatenate([ids, fresh]), return_inverse=True)
        total = np.zeros(len(merged), np.int64)
        np.add.at(total, place, np.concatenate([counts, times]))
        source = np.empty(len(merged), np.int64)
        source[place] = np.arange(len(place))  # what comes later counts
        dense = np.concatenate([dense, own])[source]
        bags = {
            name: ItemBags.joined([bags[name], part] if bags else [part]).at(source)
            for name, part in parts.items()
        }
        ids, counts = merged, total
    if not len(ids):
        raise UserError(f"data.item_id={key!r}: there are no rows, and so no items")
    known = None
    if users:
        of_user, item_places = np.concatenate(users), np.searchsorted(ids, np.concatenate(items))
        order = np.argsort(of_user, kind="stable")
        known = (of_user[order], item_places[order])
    return Catalogue(ids=ids, counts=counts, dense=dense, bags=bags, known=known)


def bags_of(batch: Batch, feature: str) -> ItemBags:
    """One feature of a batch's rows."""
    own = batch.sparse_features[feature]
    lengths = own.lengths().numpy().astype(np.int32, copy=False)
    ends = np.cumsum(lengths, dtype=np.int64)
    weights = own.weights_or_none()
    return ItemBags(
        own.values().numpy(),
        ends - lengths,
        lengths,
        None if weights is None else weights.numpy(),
    )
