"""The arrays of one request, in the order and layout in which they travel.

Shape legend: ``B`` samples, ``F`` features of a group, ``N`` ids, ``U`` shared rows (users).
Everything here is plain data: `assemble.py` makes it with checks, `encode.py` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class Bags:
    """One feature's ids for every sample.

    Attributes:
        lengths: ``[B]`` integers, the number of ids of each sample.
        values: ``[N]`` integers, the ids, sample after sample.
        weights: ``[N]`` float32, one per id; only for ``id_score_list`` features.
    """

    lengths: Array
    values: Array
    weights: Array | None = None

    @classmethod
    def from_lists(
        cls, ids: Sequence[Sequence[int]], weights: Sequence[Sequence[float]] | None = None
    ) -> Bags:
        """Bags from one list of ids per sample, and one list of weights per sample if any."""
        lengths = np.fromiter(map(len, ids), dtype=np.int32, count=len(ids))
        values = np.array([value for bag in ids for value in bag])
        if values.size == 0:
            values = values.astype(np.int64)
        if weights is None:
            return cls(lengths, values)
        flat = np.array([weight for bag in weights for weight in bag], dtype=np.float32)
        return cls(lengths, values, flat)


# What a caller may give for one feature: `Bags`; a tuple (lengths, values[, weights]); a list
# with one list of ids per sample; an integer array [B] (one id each) or [B, k] (k ids each).
BagsLike: TypeAlias = "Bags | tuple[Any, ...] | Sequence[Sequence[int]] | Array"


@dataclass(frozen=True)
class Shared:
    """Features that many samples of a request have in common, given once per user.

    Attributes:
        features: the name of each such feature with its bags for the ``U`` users.
        row_index: ``[B]`` integers in ``[0, U)``: which user each sample belongs to.
    """

    features: Mapping[str, BagsLike]
    row_index: Array

    @classmethod
    def one_user(cls, features: Mapping[str, BagsLike], batch_size: int) -> Shared:
        """The usual ranking request: one user, ``batch_size`` candidates."""
        return cls(features, np.zeros(batch_size, dtype=np.int32))


class GroupArrays(Bags):
    """The bags of a group's features, feature-major: lengths ``[F, B]`` int32, int32 or int64 ids."""


@dataclass(frozen=True)
class SharedArrays:
    """`Shared`, feature-major: the ``F`` features' names and ids, with lengths ``[F, U]``.

    ``row_index`` is ``[B]`` int32.
    """

    names: tuple[str, ...]
    group: GroupArrays
    row_index: Array


@dataclass(frozen=True)
class RequestArrays:
    """One request.

    Attributes:
        batch_size: ``B``, at least 1.
        dense: ``[B, F]`` float32, or None for a model without dense features.
        id_list: the unweighted features, or None.
        id_score_list: the weighted features, or None.
        shared: what is given once per user, or None.
    """

    batch_size: int
    dense: Array | None
    id_list: GroupArrays | None
    id_score_list: GroupArrays | None
    shared: SharedArrays | None = None

    @property
    def num_ids(self) -> int:
        """Ids on the wire, shared ones counted once."""
        groups = [self.id_list, self.id_score_list, self.shared.group if self.shared else None]
        return sum(group.values.size for group in groups if group is not None)
