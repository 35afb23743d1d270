"""The peers and the queries of the benchmark of retrieval, beside loops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tessera.training.bench.retrieval import (
    HISTORY,
    Interactions,
    ease,
    item_knn,
    measured,
    popularity,
)
from tessera.training.data.malformed import MalformedReport
from tessera.training.data.movielens_read import Item, MovieLens, User

USERS, ITEMS = 12, 30


@pytest.fixture(scope="module")
def tables() -> MovieLens:
    draw = np.random.default_rng(0)
    pairs = draw.permutation(USERS * ITEMS)[:240]
    ratings = np.stack(
        [pairs // ITEMS, pairs % ITEMS, draw.integers(3, 6, 240), draw.permutation(240)], axis=1
    )
    return MovieLens(
        ratings.astype(np.int64),
        {user: User(0, 1, 2) for user in range(USERS)},
        {item: Item(1990, (1,)) for item in range(ITEMS)},
        MalformedReport(),
    )


@pytest.fixture(scope="module")
def matrix() -> np.ndarray:
    return (np.random.default_rng(1).random((20, 9)) < 0.4).astype(np.float32)


def test_item_knn_is_the_cosine_of_the_nearest(matrix: np.ndarray) -> None:
    weights = item_knn(matrix, neighbours=3, shrinkage=2.0)
    for scored in range(9):
        similar = {}
        for other in range(9):
            if other != scored:
                both = float((matrix[:, scored] * matrix[:, other]).sum())
                sizes = math.sqrt(matrix[:, scored].sum()) * math.sqrt(matrix[:, other].sum())
                similar[other] = both / (sizes + 2.0)
        least = sorted(similar.values())[-3]
        for other in range(9):
            expected = similar.get(other, 0.0)
            expected = expected if expected >= least else 0.0
            assert weights[other, scored] == pytest.approx(expected, abs=1e-6)


def test_ease_regresses_every_item_on_the_others(matrix: np.ndarray) -> None:
    weights = ease(matrix, ridge=5.0)
    known = matrix.astype(np.float64)
    for item in range(9):
        others = [other for other in range(9) if other != item]
        own = known[:, others]
        expected = np.linalg.solve(own.T @ own + 5.0 * np.eye(8), own.T @ known[:, item])
        np.testing.assert_allclose(weights[others, item], expected, atol=1e-5)
        assert weights[item, item] == 0


def test_popularity_is_the_same_for_all(matrix: np.ndarray) -> None:
    profile = np.zeros((1, 9), np.float32)
    profile[0, 4] = 1
    np.testing.assert_array_equal((profile @ popularity(matrix))[0], matrix.sum(axis=0))


@pytest.mark.parametrize("way", ["random", "time"])
def test_a_history_shows_nothing_that_is_held_out_or_comes_later(tables, way) -> None:  # type: ignore[no-untyped-def]
    rows = Interactions(tables, way)
    ratings = tables.ratings[np.argsort(tables.ratings[:, 3])]
    if way == "time":
        ratings = ratings[ratings[:, 2] >= 4]
        assert (np.diff(rows.split) >= 0).all()
    for place, (user, item, _, time) in enumerate(ratings.tolist()):
        history = rows.histories[place].tolist()
        assert item not in history
        assert len(history) <= HISTORY
        for other in history:
            (known,) = np.flatnonzero((ratings[:, 0] == user) & (ratings[:, 1] == other))
            assert rows.split[known] == 0 if way == "random" else ratings[known, 3] < time


@pytest.mark.parametrize("way", ["random", "time"])
def test_queries_ask_for_what_is_held_out(tables, way) -> None:  # type: ignore[no-untyped-def]
    rows = Interactions(tables, way)
    asked = rows.asked("test")
    assert len(asked.users) > 3
    for query, user in enumerate(asked.users.tolist()):
        wanted = {
            int(item)
            for item, own, split in zip(rows._items, rows.users, rows.split, strict=True)
            if own == user and split == 2
        }
        known = set(rows.items[asked.excluded[query]].tolist())
        found = set(rows.items[asked.relevant[query]].tolist())
        assert found == {item for item in wanted - known if item in rows.items}
        assert asked.missing[query] == len(wanted - set(rows.items.tolist()))
    # A model that knows what is wanted finds all that can be found.
    perfect = np.zeros((len(asked.users), len(rows.items)), np.float32)
    for query, places in enumerate(asked.relevant):
        perfect[query, places] = 1
    found = measured(asked, perfect, np.eye(len(rows.items), dtype=np.float32), "test")
    if not asked.missing.any():
        np.testing.assert_allclose(found["test ndcg@10"], 1.0)
    assert (found["test recall@20"] <= 1.0).all()
    assert found["test recall@20"].mean() > 0.5
