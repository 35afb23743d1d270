"""Requests drawn at random from a model's schema: for load tests, benchmarks and first tries.

The draw is vectorised over all features, so that a generator spends its time on sending.
Shape legend: ``B`` samples, ``F`` features of a group, ``N`` ids, ``U`` users.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tessera.errors import UserError
from tessera.serving.client.arrays import Array, GroupArrays, RequestArrays, SharedArrays
from tessera.serving.package.schema import FeatureSpec, InputSchema

# An odd number, so that multiplication modulo 2**64 maps different ranks to different ids.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
# An id of more than these many distinct values makes no difference to a cache or a hash.
_MAX_UNIVERSE = 2**40


@dataclass(frozen=True, kw_only=True)
class Draw:
    """How requests look.

    Attributes:
        ids: ``power_law`` (a few ids are asked for most of the time, as in click logs) or
            ``uniform`` (every row equally often: the worst case for caches).
        exponent: of the power law: the id of rank r is drawn in proportion to ``r**-exponent``.
        bags: ``geometric`` bag lengths with mean ``mean_bag``, none longer than ``max_bag``;
            ``uniform`` lengths from 0 to ``max_bag``; or ``one``, exactly one id a bag.
        mean_bag: mean of the geometric lengths before they are cut at ``max_bag``, in ids.
        max_bag: the longest bag, in ids.
        missing_dense: the share of dense values left missing (NaN), where the model takes that.

    Raises:
        UserError: a value is out of range.
    """

    ids: Literal["power_law", "uniform"] = "power_law"
    exponent: float = 1.05
    bags: Literal["geometric", "uniform", "one"] = "geometric"
    mean_bag: float = 2.0
    max_bag: int = 50
    missing_dense: float = 0.1

    def __post_init__(self) -> None:
        rules = {
            "ids": (self.ids in {"power_law", "uniform"}, "'power_law' or 'uniform'"),
            "bags": (
                self.bags in {"geometric", "uniform", "one"},
                "'geometric', 'uniform' or 'one'",
            ),
            "exponent": (self.exponent > 0, "positive"),
            "mean_bag": (self.mean_bag > 0, "positive"),
            "max_bag": (self.max_bag >= 1, "at least 1"),
            "missing_dense": (0 <= self.missing_dense <= 1, "from 0 to 1"),
        }
        for name, (holds, must) in rules.items():
            if not holds:
                raise UserError(f"{name} is {getattr(self, name)!r}; it must be {must}")


class RequestDrawer:
    """Draws requests that the model with ``schema`` accepts.

    The same seed gives the same requests.  Not to be shared between threads.  ``shared`` names the
    ``id_list`` features that `ranking` gives once for the user (None: the first half of them); a
    name that is not one is a `UserError`.
    """

    def __init__(
        self,
        schema: InputSchema,
        draw: Draw | None = None,
        *,
        seed: int = 0,
        shared: Sequence[str] | None = None,
    ) -> None:
        self._schema = schema
        self._draw = draw or Draw()
        self._rng = np.random.default_rng(seed)
        self._id_list = schema.group("id_list")
        self._id_score_list = schema.group("id_score_list")
        names = [feature.name for feature in self._id_list]
        self._shared = tuple(names[: len(names) // 2] if shared is None else shared)
        for name in self._shared:
            if name not in names:
                raise UserError(f"shared feature {name!r} is not an id_list feature of the model")

    def samples(self, batch_size: int) -> RequestArrays:
        """``batch_size`` samples that have nothing in common."""
        return RequestArrays(
            batch_size=batch_size,
            dense=self._dense(batch_size),
            id_list=self._group(self._id_list, batch_size, weighted=False),
            id_score_list=self._group(self._id_score_list, batch_size, weighted=True),
        )

    def ranking(self, candidates: int) -> RequestArrays:
        """One user with ``candidates`` candidates; the user's ids travel once."""
        user = [feature for feature in self._id_list if feature.name in self._shared]
        rest = [feature for feature in self._id_list if feature.name not in self._shared]
        user_group = self._group(user, 1, weighted=False)
        shared = None
        if user_group is not None:
            names = tuple(feature.name for feature in user)
            shared = SharedArrays(names, user_group, np.zeros(candidates, dtype=np.int32))
        return RequestArrays(
            batch_size=candidates,
            dense=self._dense(candidates),
            id_list=self._group(rest, candidates, weighted=False),
            id_score_list=self._group(self._id_score_list, candidates, weighted=True),
            shared=shared,
        )

    def _dense(self, batch_size: int) -> Array | None:
        width = len(self._schema.dense_features)
        if width == 0:
            return None
        dense: Array = self._rng.standard_normal((batch_size, width), dtype=np.float32)
        if self._schema.dense_missing == "nan" and self._draw.missing_dense:
            dense[self._rng.random(dense.shape) < self._draw.missing_dense] = np.nan
        return dense

    def _group(
        self, features: Sequence[FeatureSpec], batch_size: int, *, weighted: bool
    ) -> GroupArrays | None:
        if not features:
            return None
        lengths = self._lengths((len(features), batch_size))
        per_feature = lengths.sum(axis=1)
        universe = np.repeat([_universe(feature) for feature in features], per_feature)
        ranks = self._ranks(universe)
        # Where the id is hashed, ids look like the 64-bit ones of real logs.
        hashed = np.repeat([feature.hashing != "none" for feature in features], per_feature)
        values = np.where(hashed, (ranks.astype(np.uint64) * _SPREAD).view(np.int64), ranks)
        weights = None
        if weighted:
            weights = self._rng.random(values.size, dtype=np.float32)
        return GroupArrays(lengths, values, weights)

    def _lengths(self, shape: tuple[int, int]) -> Array:
        draw = self._draw
        if draw.bags == "one":
            return np.ones(shape, dtype=np.int32)
        if draw.bags == "uniform":
            uniform: Array = self._rng.integers(0, draw.max_bag + 1, shape, dtype=np.int32)
            return uniform
        # numpy's geometric counts from 1, a bag's length from 0: a mean of m needs p = 1/(m+1).
        lengths = self._rng.geometric(1.0 / (draw.mean_bag + 1.0), shape) - 1
        capped: Array = np.minimum(lengths, draw.max_bag).astype(np.int32)
        return capped

    def _ranks(self, universe: Array) -> Array:
        """One number in ``[0, universe)`` for each entry, int64."""
        u = self._rng.random(universe.size)
        if self._draw.ids == "uniform":
            ranks = np.floor(u * universe)
        else:
            ranks = power_law_quantile(u, universe, self._draw.exponent)
        # Rounding may reach the end of the range itself.
        in_range: Array = np.minimum(ranks.astype(np.int64), universe - 1)
        return in_range


def power_law_quantile(u: Array, universe: Array, exponent: float) -> Array:
    """The rank (from 0, as a whole float) below which a share ``u`` of a power law lies.

    The continuous law with density proportional to ``x**-exponent`` on ``[1, universe + 1)``,
    inverted in closed form and rounded down: one pass, however many rows there are.  ``u`` is
    ``[N]`` in ``[0, 1)``, ``universe`` ``[N]`` numbers of ranks, the exponent positive.
    """
    top = universe.astype(np.float64) + 1.0
    if abs(exponent - 1.0) < 1e-9:
        x = np.exp(u * np.log(top))
    else:
        power = 1.0 - exponent
        x = (u * (top**power - 1.0) + 1.0) ** (1.0 / power)
    ranks: Array = np.floor(x) - 1.0
    return ranks


def _universe(feature: FeatureSpec) -> int:
    """How many different ids to draw from: the table's rows, all in range under ``none``."""
    return min(feature.rows, _MAX_UNIVERSE)
