"""Drawn requests fit the schema, repeat with their seed and have the shape that was asked for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import UserError
from tessera.serving.client import Draw, RequestDrawer, encode_request
from tessera.serving.client.arrays import Bags, Shared
from tessera.serving.client.assemble import assemble
from tessera.serving.client.latency import LatencySummary
from tessera.serving.client.random_requests import power_law_quantile
from tests.client.client_schemas import feature, schema

MODEL = schema(
    features=(
        feature("raw", rows=10, hashing="none"),
        feature("hashed", rows=1000),
        feature("one", rows=1, hashing="none"),
        feature("weighted", "id_score_list", rows=50, hashing="none"),
    )
)


def by_name(arrays, model):
    """Turn drawn arrays back into the form that `assemble` checks."""
    sparse = {}
    shared = set() if arrays.shared is None else set(arrays.shared.names)
    for group_name, group in (
        ("id_list", arrays.id_list),
        ("id_score_list", arrays.id_score_list),
    ):
        names = [f.name for f in model.group(group_name) if f.name not in shared]
        begin = 0
        for row, name in enumerate(names):
            end = begin + group.lengths[row].sum()
            weights = None if group.weights is None else group.weights[begin:end]
            sparse[name] = Bags(group.lengths[row], group.values[begin:end], weights)
            begin = end
    return sparse


@given(
    samples=st.integers(1, 20),
    seed=st.integers(0, 1000),
    ids=st.sampled_from(["power_law", "uniform"]),
    bags=st.sampled_from(["geometric", "uniform", "one"]),
    exponent=st.floats(0.2, 3),
    max_bag=st.integers(1, 60),
)
def test_every_drawn_request_fits_the_schema(*, samples, seed, ids, bags, exponent, max_bag):
    draw = Draw(ids=ids, bags=bags, exponent=exponent, max_bag=max_bag)
    arrays = RequestDrawer(MODEL, draw, seed=seed).samples(samples)
    sparse = by_name(arrays, MODEL)
    assemble(arrays.dense, sparse, schema=MODEL)
    for name, rows in (("raw", 10), ("one", 1), ("weighted", 50)):
        values = sparse[name].values
        assert values.size == 0 or (values.min() >= 0 and values.max() < rows)
    assert arrays.id_list.lengths.max() <= max_bag
    if bags == "one":
        assert (arrays.id_list.lengths == 1).all()


def test_a_ranking_request_gives_the_users_features_once():
    arrays = RequestDrawer(MODEL, Draw(bags="one"), seed=1, shared=["hashed"]).ranking(30)
    assert arrays.shared.names == ("hashed",)
    assert arrays.shared.group.lengths.shape == (1, 1)
    assert arrays.id_list.lengths.shape == (2, 30)
    shared = Shared(
        {"hashed": (arrays.shared.group.lengths[0], arrays.shared.group.values)},
        arrays.shared.row_index,
    )
    assemble(arrays.dense, by_name(arrays, MODEL), shared=shared, schema=MODEL)


def test_half_of_the_features_are_the_users_where_nothing_is_said():
    assert RequestDrawer(MODEL, seed=1).ranking(2).shared.names == ("raw",)
    alone = schema(features=(feature("only"),))
    assert RequestDrawer(alone, seed=1).ranking(2).shared is None


def test_the_seed_decides():
    def draw(seed):
        return encode_request(RequestDrawer(MODEL, seed=seed).samples(5))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_missing_values_only_where_the_model_takes_them():
    draw = Draw(missing_dense=0.5)
    taken = RequestDrawer(MODEL, draw, seed=1).samples(1000).dense
    # 2000 draws: the share's standard deviation is .011, so .1 away is a wrong rate.
    assert abs(np.isnan(taken).mean() - 0.5) < 0.1
    refused = RequestDrawer(schema(missing="refuse"), draw, seed=1).samples(1000).dense
    assert not np.isnan(refused).any()


def test_hashed_ids_are_wide():
    ids = by_name(RequestDrawer(MODEL, Draw(bags="one"), seed=1).samples(1000), MODEL)
    hashed = ids["hashed"].values
    assert np.abs(hashed).max() > 2**62
    assert np.unique(hashed).size <= 1000


def test_mean_bag():
    lengths = RequestDrawer(MODEL, Draw(mean_bag=3), seed=1).samples(10_000).id_list.lengths
    # 30,000 draws with standard deviation sqrt(12): the mean's is .02.
    assert abs(lengths.mean() - 3) < 0.1
    assert lengths.min() == 0


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.05, 2.0])
def test_the_power_law_has_its_exponent(exponent):
    rows = 1000
    u = (np.arange(200_000) + 0.5) / 200_000
    ranks = power_law_quantile(u, np.full(u.size, rows), exponent).astype(int)
    share = np.bincount(ranks, minlength=rows) / u.size
    edges = np.arange(1, rows + 2, dtype=float)
    # Reference: the density summed numerically over each rank's interval.
    fine = np.linspace(0, 1, 101)[:-1] + 0.005
    density = np.array([((lo + fine) ** -exponent).mean() for lo in edges[:-1]])
    density /= density.sum()
    # 200,000 evenly spaced quantiles place each edge to within one of them.
    assert np.abs(share - density).max() < 2e-5 + 1e-3 * density.max()


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": "zipf"},
        {"bags": "two"},
        {"exponent": 0},
        {"mean_bag": 0},
        {"max_bag": 0},
        {"missing_dense": 1.5},
    ],
)
def test_unusable_draws(wrong):
    (name,) = wrong
    with pytest.raises(UserError, match=f"{name} is "):
        Draw(**wrong)


def test_unknown_shared_feature():
    with pytest.raises(UserError, match="'weighted' is not an id_list feature"):
        RequestDrawer(MODEL, shared=["weighted"])


def test_percentiles_are_measured_latencies():
    summary = LatencySummary.of_seconds([i / 1000 for i in range(1, 1001)])
    assert summary.calls == 1000
    assert summary.p50_ms == pytest.approx(500)
    assert summary.p90_ms == pytest.approx(900)
    assert summary.p99_ms == pytest.approx(990)
    # 99.9 % of 1000 is not exactly 999 in floating point; the next latency is 1 ms away.
    assert summary.p999_ms == pytest.approx(999, abs=1.001)
    assert summary.max_ms == pytest.approx(1000)
    assert summary.mean_ms == pytest.approx(500.5)
    assert "1000 calls" in str(summary)
    assert LatencySummary.of_seconds([]).calls == 0
