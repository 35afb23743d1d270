"""Rows of a small shop's clicks, drawn from a known model: the table that ``make demo`` trains on.

Every shopper has a taste and every product a kind; what is shown cheaply, and fits the taste, is clicked
more.  The model's own chances are known, so that the best AUC that anybody can reach is, too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

COUNTRIES = ("DE", "FR", "IT", "PL", "ES", "Zürich", "São Paulo")
DEVICES = ("phone", "tablet", "laptop")
TAGS = ("new", "sale", "organic", "gift", "kids", "outdoor", "office", "vintage")
SHOPPERS, PRODUCTS, TASTES = 2_000, 500, 8
FIRST_SECOND = 1_767_225_600  # the first of January 2026, UTC
SECONDS_BETWEEN = 20


def write_shop(path: Path, rows: int, *, seed: int, strangers: int = 0) -> float:
    """Write ``rows`` rows as Parquet; returns the AUC of the chances that the clicks were drawn with.

    ``strangers`` are shoppers more than `SHOPPERS`.
    """
    chance = np.random.default_rng(seed)
    shopper = chance.integers(SHOPPERS + strangers, size=rows)
    product = np.minimum(chance.geometric(0.01, rows) - 1, PRODUCTS - 1)
    country, device = chance.integers(len(COUNTRIES), size=rows), chance.choice(3, rows)
    price = np.exp(chance.normal(3.0, 1.0, PRODUCTS))[product] * chance.uniform(0.8, 1.2, rows)
    tag_sets = [
        chance.choice(len(TAGS), chance.integers(4), replace=False) for _ in range(PRODUCTS)
    ]
    taste, kind = (
        chance.integers(TASTES, size=SHOPPERS + strangers),
        chance.integers(TASTES, size=PRODUCTS),
    )
    appeal = chance.normal(0.0, 0.7, PRODUCTS)
    logit = (
        -1.6
        + 1.8 * (taste[shopper] == kind[product])
        + appeal[product]
        - 0.5 * (np.log(price) - 3.0)
        + np.array([0.4, 0.0, -0.2])[device]
        + 0.5 * (country == 1) * (device == 0)
    )
    odds = 1.0 / (1.0 + np.exp(-logit))
    click = (chance.random(rows) < odds).astype(np.int8)
    shown_price = np.where(chance.random(rows) < 0.05, np.nan, price.round(2))
    table = pa.table(
        {
            "time": pa.array(
                (FIRST_SECOND + SECONDS_BETWEEN * np.arange(rows)) * 1_000_000, pa.timestamp("us")
            ),
            "shopper": [f"shopper-{number}" for number in shopper],
            "product": [f"product-{number}" for number in product],
            "country": np.array(COUNTRIES)[country],
            "device": np.array(DEVICES)[device],
            "price": pa.array(shown_price, pa.float64(), from_pandas=True),
            "tags": [[TAGS[tag] for tag in tag_sets[number]] for number in product],
            "click": click,
        }
    )
    pq.write_table(table, path)
    return auc(click, odds)


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """The chance that a row that was clicked has a higher score than one that was not."""
    order = np.argsort(scores)
    ranks = np.empty(len(scores))
    ranks[order] = np.arange(1, len(scores) + 1)
    positives = int(labels.sum())
    below = ranks[labels == 1].sum() - positives * (positives + 1) / 2
    return float(below / (positives * (len(labels) - positives)))
