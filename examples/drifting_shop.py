"""Rows of a shop's clicks whose truth changes from minute to minute: what ``make demo-online`` trains on and is asked for.

What is liked drifts: each product's appeal and each country's fashion (how much it likes a kind of
product) are random walks that are drawn back to their mean, and shoppers change their taste.  The chances that clicks are drawn
with are known, so that the best AUC that anybody can reach is, too.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

COUNTRIES = ("DE", "FR", "IT", "PL", "ES", "PT")
DEVICES = ("phone", "tablet", "laptop")
KINDS = ("shoes", "books", "toys", "garden", "sports", "kitchen", "music", "bags")
SHOPPERS, PRODUCTS = 1_000, 200
STEPS_PER_HOUR = 6
APPEAL, FASHION = 0.7, 1.2
"""Standard deviations of a product's appeal and a country's fashion, in the logit."""
APPEAL_HOURS, FASHION_HOURS = 6.0, 2.5
"""Hours after which 1/e of what was is left."""
CHANGED_TASTES = 0.002
"""The share of shoppers that change their taste in a step."""

Floats = NDArray[np.float64]


class DriftingShop:
    """The shop at one moment; `drift` goes on by ten minutes."""

    def __init__(self, seed: int) -> None:
        self._chance = np.random.default_rng(seed)
        self._taste = self._chance.integers(len(KINDS), size=SHOPPERS)
        self._kind = self._chance.integers(len(KINDS), size=PRODUCTS)
        self._price = self._chance.normal(3.0, 1.0, PRODUCTS)
        self._appeal = self._chance.normal(0.0, APPEAL, PRODUCTS)
        self._fashion = self._chance.normal(0.0, FASHION, (len(COUNTRIES), len(KINDS)))

    def drift(self) -> None:
        """Ten minutes pass."""
        chance = self._chance
        for values, size, hours in (
            (self._appeal, APPEAL, APPEAL_HOURS),
            (self._fashion, FASHION, FASHION_HOURS),
        ):
            kept = np.exp(-1.0 / (STEPS_PER_HOUR * hours))
            new = chance.normal(0.0, size * np.sqrt(1.0 - kept**2), values.shape)
            values[:] = kept * values + new
        changed = chance.random(SHOPPERS) < CHANGED_TASTES
        self._taste[changed] = chance.integers(len(KINDS), size=int(changed.sum()))

    def rows(self, count: int) -> tuple[pa.Table, Floats]:
        """``count`` rows of this moment, and the chances ``[count]`` that their clicks were drawn with."""
        chance = self._chance
        shopper = chance.integers(SHOPPERS, size=count)
        product = np.minimum(chance.geometric(0.02, count) - 1, PRODUCTS - 1)
        country = chance.integers(len(COUNTRIES), size=count)
        device = chance.integers(len(DEVICES), size=count)
        price = np.exp(self._price[product]) * chance.uniform(0.8, 1.2, count)
        kind = self._kind[product]
        logit = (
            -1.5
            + 1.2 * (self._taste[shopper] == kind)
            + self._appeal[product]
            + self._fashion[country, kind]
            - 0.3 * (np.log(price) - 3.0)
            + np.array([0.4, 0.0, -0.2])[device]
        )
        odds = 1.0 / (1.0 + np.exp(-logit))
        table = pa.table(
            {
                "shopper": [f"shopper-{number}" for number in shopper],
                "product": [f"product-{number}" for number in product],
                "kind": np.array(KINDS)[kind],
                "country": np.array(COUNTRIES)[country],
                "device": np.array(DEVICES)[device],
                "price": price.round(2),
                "click": (chance.random(count) < odds).astype(np.int8),
            }
        )
        return table, odds
