"""A metric with what each row adds to it, from which come standard errors, clustered and paired.

A metric of the rows' distribution moves, to first order, by the sum of what its rows add: its influence
function (Hampel 1974; Efron's infinitesimal jackknife).  Rows of one user are not independent, so the
influences are first summed by cluster, and the sums of the clusters are taken for independent (Liang and
Zeger 1986).  Of the mean this is the usual clustered error, of the AUC that of Obuchowski (1997),
which without clusters is that of DeLong et al. (1988).  Two models that answer the same rows are
compared by the difference of their influences, row by row, so that what is hard for both cancels.

Shapes: ``N`` rows, ``U`` units that influences belong to (rows, or groups of rows), ``C`` clusters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A metric of some rows.

    Attributes:
        value: the metric; NaN where it is not defined.
        influence: ``[U]`` what each unit adds to the difference between the metric and that of all
            rows there could be; their sum is 0.
        units: ``[U]`` the row at which each unit stands, which says its cluster; None: the rows themselves.
    """

    value: float
    influence: Floats
    units: npt.NDArray[np.intp] | None = None

    def standard_error(self, clusters: Numbers | None = None) -> float:
        """The standard error of the value; NaN where it is not defined or there are fewer than 2 clusters.

        Args:
            clusters: ``[N]`` integers from 0, the cluster of each row; None: each unit is one.
        """
        if math.isnan(self.value):
            return math.nan
        sums = self.influence
        count = len(sums)
        if clusters is not None:
            of_unit = clusters if self.units is None else clusters[self.units]
            sums = np.bincount(of_unit, weights=self.influence).astype(np.float64)
            count = int(np.count_nonzero(np.bincount(of_unit)))
        if count < 2:
            return math.nan
        return math.sqrt(count / (count - 1) * float(np.dot(sums, sums)))

    def minus(self, other: Estimate) -> Estimate:
        """The difference of the same metric of two models on the same rows."""
        assert len(self.influence) == len(other.influence), "other rows"
        return Estimate(
            value=self.value - other.value,
            influence=self.influence - other.influence,
            units=self.units,
        )


def undefined(rows: int) -> Estimate:
    """A metric that these rows do not have."""
    return Estimate(value=math.nan, influence=np.zeros(rows))


def mean_of(values: Numbers, weights: Numbers | None = None) -> Estimate:
    """The (weighted) mean of ``[N]`` values; NaN where the weights' sum is 0."""
    x = np.asarray(values, np.float64)
    if weights is None:
        if not len(x):
            return undefined(0)
        mean = float(np.mean(x))
        return Estimate(value=mean, influence=(x - mean) / len(x))
    w = np.asarray(weights, np.float64)
    total = float(w.sum())
    if not total > 0:
        return undefined(len(x))
    mean = float(np.dot(w, x)) / total
    return Estimate(value=mean, influence=w * (x - mean) / total)


def codes_of(values: Numbers) -> npt.NDArray[np.int64]:
    """``[N]`` integers from 0 without gaps, equal where the ``[N]`` values are equal."""
    _, codes = np.unique(values, return_inverse=True)
    return np.asarray(codes, np.int64).reshape(-1)
