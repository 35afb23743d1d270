"""Whose row it is: the column that says so, and its values in batches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tessera.training.data.batch import Batch
from tessera.training.data.columns import FeatureColumns

_NAMES = ("user", "user_id", "userid", "uid", "customer", "customer_id", "member_id", "visitor_id")
"""Names of columns, in small letters, that are taken to say it."""


def user_feature(columns: FeatureColumns) -> str | None:
    """The feature of one id whose column, or whose own name, says whose row it is; None: none does."""
    for one in columns.sparse:
        if one.kind == "categorical" and {one.name.lower(), (one.column or "").lower()} & {*_NAMES}:
            return one.name
    return None


def users_of(batch: Batch, feature: str) -> npt.NDArray[np.int64]:
    """``[B]`` the ids of a feature of one id; rows without one are together one user, with id -1."""
    bags = batch.sparse_features[feature]
    lengths = bags.lengths().cpu().numpy()
    ids = np.full(len(lengths), -1, np.int64)
    ids[lengths > 0] = bags.values().cpu().numpy()
    return ids
