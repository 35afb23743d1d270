"""The known model that `tessera datagen` draws its rows from.

A row's 13 integers and 26 categories are drawn independently of each other: integers are rounded
log-normal numbers, categories follow a power law, and every column is missing at a rate of its
own.  The label is 1 with probability ``sigmoid(logit)``, where the logit, a function of what the row
shows and nothing else, is a bias plus

* a slope and a curvature in each integer's standardised ``log1p``, and an effect of its absence;
* an effect of each category's value, and of its absence;
* for some pairs of columns, the dot product of two short vectors, one per value: a factorisation
  machine's term (Rendle, Factorization Machines, ICDM 2010), which no model that is linear in the
  columns can express.

So nobody can rank these rows better than ``sigmoid(logit)`` does, on average.  A value that is met
rarely has an effect close to 0: its own could not be learned from a million rows, and would only
set the best possible AUC apart from any reachable one.

Shapes: ``n`` rows; ``[13, n]`` integers; ``[26, n]`` categories by rank (0 is the most frequent).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.training.data.criteo_format import NUM_DENSE, NUM_SPARSE

CARDINALITIES = (
    1200, 500, 20000, 5000, 60, 15, 3000, 100, 3, 8000, 2000, 30000, 1500, 24, 4000, 6000, 10,
    1000, 300, 4, 50000, 18, 16, 2500, 80, 7000,
)  # fmt: skip
PAIRS = ((4, 13), (5, 24), (7, 21), (16, 22))
PAIR_RANK = 2

LOGIT_STD = 1.3
DENSE_SHARE, CATEGORY_SHARE, PAIR_SHARE = 0.37, 0.55, 0.08
"""What each kind of term gives to the logit's variance."""

RARE = 1e-3
"""A value of this frequency has half of the effect that its draw says; a rarer one less."""

PILOT_ROWS = 1 << 16
"""Rows that are drawn to set the terms' scales and the bias."""

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Rows:
    """What rows show.

    Attributes:
        integers: ``[13, n]``; 0 where missing.
        integer_present: ``[13, n]``.
        ranks: ``[26, n]``; 0 where missing.
        rank_present: ``[26, n]``.
    """

    integers: Integers
    integer_present: Mask
    ranks: Integers
    rank_present: Mask


@dataclass(frozen=True)
class DenseColumn:
    """``x = floor(exp(location + spread * z)) - shift`` for a standard normal ``z``.

    The logit's term is ``slope * t + curvature * (t * t - 1)`` with ``t = (log1p(x + shift) - location) /
    spread``, or ``missing_effect``.
    """

    location: float
    spread: float
    shift: int
    missing_rate: float
    slope: float
    curvature: float
    missing_effect: float


@dataclass(frozen=True)
class SparseColumn:
    """Rank ``k`` of ``cardinality`` has probability proportional to ``(k + 3) ** -exponent``."""

    cardinality: int
    exponent: float
    missing_rate: float
    missing_effect: float

    def probabilities(self) -> Floats:
        """``[cardinality]``, summing to 1: of each rank where the column is present."""
        ranks = np.arange(self.cardinality, dtype=np.float64)
        weights: Floats = np.power(ranks + 3.0, -self.exponent)
        weights /= weights.sum()
        return weights


class GeneratingModel:
    """The model of one seed; two of the same seed and rate are equal.

    Args:
        seed: chooses every parameter.
        positive_rate: share of labels that are 1, in (0, 1); reached up to sampling noise.
    """

    def __init__(self, seed: int, positive_rate: float) -> None:
        self.seed, self.positive_rate = seed, positive_rate
        random = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,)))
        self.dense = [_draw_dense(random, column) for column in range(NUM_DENSE)]
        self.sparse = [_draw_sparse(random, size) for size in CARDINALITIES]
        self.effects = [
            random.normal(size=column.cardinality) * _weight(column) for column in self.sparse
        ]
        self.pair_vectors = [
            tuple(
                random.normal(size=(self.sparse[side].cardinality, PAIR_RANK))
                * _weight(self.sparse[side])[:, None]
                for side in pair
            )
            for pair in PAIRS
        ]
        self._cumulative = [np.cumsum(column.probabilities()) for column in self.sparse]
        pilot = self.draw(random, PILOT_ROWS)
        terms = self._terms(pilot)
        shares = (DENSE_SHARE, CATEGORY_SHARE, PAIR_SHARE)
        self.scales = tuple(
            LOGIT_STD * share**0.5 / float(term.std())
            for share, term in zip(shares, terms, strict=True)
        )
        self.bias = 0.0
        self.bias = _bias_for(self.logit(pilot), positive_rate)

    def draw(self, random: np.random.Generator, rows: int) -> Rows:
        """``rows`` rows without their labels."""
        integers = np.zeros((NUM_DENSE, rows), np.int64)
        integer_present = np.empty((NUM_DENSE, rows), np.bool_)
        for number, column in enumerate(self.dense):
            value = np.exp(column.location + column.spread * random.standard_normal(rows))
            integer_present[number] = random.random(rows) >= column.missing_rate
            integers[number] = np.minimum(value, 1e6).astype(np.int64) - column.shift
        integers *= integer_present
        ranks = np.zeros((NUM_SPARSE, rows), np.int64)
        rank_present = np.empty((NUM_SPARSE, rows), np.bool_)
        for number, sparse in enumerate(self.sparse):
            rank = np.searchsorted(self._cumulative[number], random.random(rows), side="right")
            ranks[number] = np.minimum(rank, sparse.cardinality - 1)
            rank_present[number] = random.random(rows) >= sparse.missing_rate
        ranks *= rank_present
        return Rows(integers, integer_present, ranks, rank_present)

    def logit(self, rows: Rows) -> Floats:
        """``[n]``: the log-odds of label 1."""
        total = np.full(rows.integers.shape[1], self.bias)
        for scale, term in zip(self.scales, self._terms(rows), strict=True):
            total += scale * term
        return total

    def probability(self, rows: Rows) -> Floats:
        """``[n]``: the probability of label 1."""
        return 1 / (1 + np.exp(-self.logit(rows)))

    def ids(self, ranks: Integers) -> npt.NDArray[np.uint32]:
        """``[26, n]`` ranks as the 32-bit ids that the text shows; one-to-one in each column."""
        columns = np.arange(1, NUM_SPARSE + 1, dtype=np.uint32)[:, None]
        mixed = ranks.astype(np.uint32) + columns * np.uint32(0x9E3779B1)
        # Multiplications by odd numbers and xor-shifts: each step can be undone.
        for multiplier, bits in ((0x7FEB352D, 15), (0x846CA68B, 16)):
            mixed ^= mixed >> np.uint32(16)
            mixed *= np.uint32(multiplier)
            mixed ^= mixed >> np.uint32(bits)
        return mixed

    def to_json(self) -> dict[str, Any]:
        """The parameters; the values' own effects follow from the seed (attribute ``effects``)."""
        return {
            "seed": self.seed,
            "positive_rate": self.positive_rate,
            "bias": self.bias,
            "scales": dict(zip(("dense", "categories", "pairs"), self.scales, strict=True)),
            "integers": [dataclasses.asdict(column) for column in self.dense],
            "categories": [dataclasses.asdict(column) for column in self.sparse],
            "pairs": [[f"C{left + 1}", f"C{right + 1}"] for left, right in PAIRS],
            "pair_rank": PAIR_RANK,
        }

    def _terms(self, rows: Rows) -> tuple[Floats, Floats, Floats]:
        """The unscaled dense, category and pair terms, each ``[n]``."""
        count = rows.integers.shape[1]
        dense, categories, pairs = np.zeros(count), np.zeros(count), np.zeros(count)
        for number, column in enumerate(self.dense):
            shown = np.log1p(rows.integers[number] + column.shift)
            t = (shown - column.location) / column.spread
            effect = column.slope * t + column.curvature * (t * t - 1)
            dense += np.where(rows.integer_present[number], effect, column.missing_effect)
        for number, sparse in enumerate(self.sparse):
            effect = self.effects[number][rows.ranks[number]]
            categories += np.where(rows.rank_present[number], effect, sparse.missing_effect)
        for (left, right), (left_vectors, right_vectors) in zip(
            PAIRS, self.pair_vectors, strict=True
        ):
            both = rows.rank_present[left] & rows.rank_present[right]
            product = left_vectors[rows.ranks[left]] * right_vectors[rows.ranks[right]]
            pairs += np.where(both, product.sum(axis=1), 0)
        return dense, categories, pairs


def _weight(column: SparseColumn) -> Floats:
    frequency = column.probabilities() * (1 - column.missing_rate)
    return frequency / (frequency + RARE)


def _draw_dense(random: np.random.Generator, number: int) -> DenseColumn:
    location, spread = random.uniform(0.5, 5.0), random.uniform(0.8, 1.4)
    slope, curvature, missing_effect = random.normal(size=3)
    return DenseColumn(
        location=location,
        spread=spread,
        shift=3 if number == 1 else 0,  # Criteo's I2 has values down to -3
        missing_rate=float(random.choice([0.0, 0.05, 0.2, 0.45])),
        slope=slope,
        curvature=0.3 * curvature,
        missing_effect=missing_effect,
    )


def _draw_sparse(random: np.random.Generator, cardinality: int) -> SparseColumn:
    return SparseColumn(
        cardinality=cardinality,
        exponent=random.uniform(1.5, 1.9),
        missing_rate=float(random.choice([0.0, 0.0, 0.04, 0.4])),
        missing_effect=random.normal(),
    )


def _bias_for(logit: Floats, positive_rate: float) -> float:
    """The number to add to ``logit`` so that its mean probability is ``positive_rate``."""
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        if (1 / (1 + np.exp(-(logit + middle)))).mean() < positive_rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2
