"""Every metric against scikit-learn or a plain loop, with ties, weights and the edges."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from tessera.training.metrics.binary import (
    BINARY_METRICS,
    accuracy,
    auc_estimate,
    calibration_table,
    curves,
    sigmoid,
)
from tessera.training.metrics.estimate import mean_of
from tessera.training.metrics.ranking import GroupRanking, gauc, ndcg_at_k, recall_at_k
from tessera.training.metrics.regression import REGRESSION_METRICS


def binary_estimates(p, y, w=None):
    return {name: metric(p, y, w) for name, metric in BINARY_METRICS.items()}


def regression_estimates(p, y, w=None):
    return {name: metric(p, y, w) for name, metric in REGRESSION_METRICS.items()}


def clicks(rows, seed, *, decimals=2):
    random = np.random.default_rng(seed)
    p = np.round(sigmoid(random.normal(size=rows) - 1), decimals).clip(0.01, 0.99)
    labels = (random.random(rows) < p**1.3).astype(np.float32)
    return p.astype(np.float32), labels, random.integers(1, 5, rows).astype(np.float32)


@pytest.mark.parametrize("weighted", [False, True])
def test_binary_metrics_equal_scikit_learn(weighted):
    p, y, w = clicks(5000, 1)
    weights = w if weighted else None
    found = {name: e.value for name, e in binary_estimates(p, y, weights).items()}
    p64 = p.astype(np.float64)
    loss = sk.log_loss(y, p64, sample_weight=weights)
    rate = np.average(y.astype(np.float64), weights=weights)
    entropy = sk.log_loss(y, np.full(len(y), rate), sample_weight=weights)
    # scikit-learn sums trapezoids and products in another order: bounds of 1e-9.
    assert found["auc"] == pytest.approx(sk.roc_auc_score(y, p, sample_weight=weights), abs=1e-9)
    assert found["log_loss"] == pytest.approx(loss, rel=1e-9)
    assert found["normalised_entropy"] == pytest.approx(loss / entropy, rel=1e-9)
    assert found["calibration"] == pytest.approx(np.average(p64, weights=weights) / rate, rel=1e-9)
    expected = sk.accuracy_score(y, p >= 0.5, sample_weight=weights)
    assert found["accuracy"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("weighted", [False, True])
def test_curves_equal_scikit_learn(weighted):
    p, y, w = clicks(800, 2)
    weights = w if weighted else None
    found = curves(p, y, weights)
    false, true, _ = sk.roc_curve(y, p, sample_weight=weights, drop_intermediate=False)
    np.testing.assert_allclose(found.false_positive_rate, false, atol=1e-9)
    np.testing.assert_allclose(found.true_positive_rate, true, atol=1e-9)
    precision, recall, _ = sk.precision_recall_curve(y, p, sample_weight=weights)
    # scikit-learn goes from the lowest threshold up, and ends with a point of its own, (1, 0).
    np.testing.assert_allclose(found.precision[1:], precision[-2::-1], atol=1e-9)
    np.testing.assert_allclose(found.true_positive_rate[1:], recall[-2::-1], atol=1e-9)


@pytest.mark.parametrize("weighted", [False, True])
def test_regression_metrics_equal_scikit_learn(weighted):
    random = np.random.default_rng(3)
    y = random.gamma(2.0, 3.0, 2000).astype(np.float32)
    p = (y + random.normal(size=2000)).astype(np.float32)
    w = random.integers(1, 4, 2000) if weighted else None
    found = {name: e.value for name, e in regression_estimates(p, y, w).items()}
    y, p = y.astype(np.float64), p.astype(np.float64)
    expected = {
        "mean_squared_error": sk.mean_squared_error(y, p, sample_weight=w),
        "root_mean_squared_error": sk.root_mean_squared_error(y, p, sample_weight=w),
        "mean_absolute_error": sk.mean_absolute_error(y, p, sample_weight=w),
        "r_squared": sk.r2_score(y, p, sample_weight=w),
        "calibration": np.average(p, weights=w) / np.average(y, weights=w),
    }
    assert found == pytest.approx(expected, rel=1e-9)


def test_weights_are_repetitions():
    p, y, w = clicks(300, 4)
    times = w.astype(int)
    weighted = binary_estimates(p, y, w)
    repeated = binary_estimates(np.repeat(p, times), np.repeat(y, times))
    for name, found in weighted.items():
        assert found.value == pytest.approx(repeated[name].value, rel=1e-9), name


def test_influences_are_the_change_when_a_row_counts_more():
    """Against numeric derivatives in a row's weight, the definition of an influence."""
    p, y, _ = clicks(60, 5, decimals=1)
    ones, step = np.ones(60), 1e-5
    metrics = {**binary_estimates(p, y, ones), **regression_estimates(p, y, ones)}
    for row in range(0, 60, 7):
        more = ones.copy()
        more[row] += step
        changed = {**binary_estimates(p, y, more), **regression_estimates(p, y, more)}
        for name, found in metrics.items():
            slope = (changed[name].value - found.value) / step
            assert found.influence[row] == pytest.approx(slope, rel=2e-3, abs=2e-6), name
    for name, found in metrics.items():
        assert found.influence.sum() == pytest.approx(0, abs=1e-9), name


def test_metrics_that_rows_do_not_have_are_nan():
    p = np.float32([0.2, 0.4])
    for labels in (np.zeros(2), np.ones(2)):
        found = binary_estimates(p, labels)
        assert math.isnan(found["auc"].value)
        assert math.isnan(found["auc"].standard_error())
        assert math.isnan(found["normalised_entropy"].value)
        assert math.isfinite(found["log_loss"].value)
        assert curves(p, labels) is None
        assert math.isnan(gauc(p, labels, np.zeros(2, int)))
    assert math.isnan(binary_estimates(p, np.zeros(2))["calibration"].value)
    assert math.isnan(regression_estimates(p, np.ones(2))["r_squared"].value)
    none = np.float32([])
    for found in (
        *binary_estimates(none, none).values(),
        *regression_estimates(none, none).values(),
    ):
        assert math.isnan(found.value)
    assert math.isnan(mean_of(p, np.zeros(2)).value)
    for metric in (
        GroupRanking(none, none, none).recall_at_k,
        GroupRanking(none, none, none).ndcg_at_k,
    ):
        assert math.isnan(metric(3).value)


def test_calibration_table_holds_every_row_once():
    p, y, w = clicks(1003, 6)
    found = calibration_table(p, y, w, bins=10)
    assert len(found.rows) == 10
    assert found.rows.sum() == 1003
    assert found.weight.sum() == pytest.approx(w.sum())
    assert np.all(np.diff(found.predicted) >= 0)
    assert np.dot(found.weight, found.observed) == pytest.approx(np.dot(w, y))
    assert np.dot(found.weight, found.predicted) == pytest.approx(np.dot(w, p.astype(float)))
    assert len(calibration_table(p[:3], y[:3], bins=10).rows) == 3


def test_one_half_is_predicted_as_label_1():
    assert accuracy(np.array([0.5, 0.5, 0.4]), np.array([1, 0, 0])).value == pytest.approx(2 / 3)


# Groups of few rows with few different scores: ties within and around the first k.
grouped = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=12
)


def every_order(rows):
    """All orders of (score, label) from high to low in which equal scores stand in every order."""
    return [
        order
        for order in itertools.permutations(rows)
        if all(a[0] >= b[0] for a, b in itertools.pairwise(order))
    ]


def plain_ranking(rows, k):
    """GAUC, recall@k and NDCG@k by loops over groups, pairs and orders."""
    by_group = {}
    for group, score, label in rows:
        by_group.setdefault(group, []).append((score, label))
    aucs, impressions, recalls, gains = [], [], [], []
    for own in by_group.values():
        good = [score for score, label in own if label > 0]
        bad = [score for score, label in own if label == 0]
        if good and bad:
            won = sum((g > b) + (g == b) / 2 for g in good for b in bad)
            aucs.append(won / (len(good) * len(bad)))
            impressions.append(len(own))
        if good:
            orders = every_order(own)
            found = [sum(label > 0 for _, label in order[:k]) for order in orders]
            recalls.append(np.mean(found) / len(good))
            best = sorted((label for _, label in own), reverse=True)
            ideal = sum(label / math.log2(2 + n) for n, label in enumerate(best[:k]))
            got = [
                sum(label / math.log2(2 + n) for n, (_, label) in enumerate(order[:k]))
                for order in orders
            ]
            gains.append(np.mean(got) / ideal)
    mean_auc = np.average(aucs, weights=impressions) if aucs else math.nan
    return mean_auc, *(np.mean(each) if each else math.nan for each in (recalls, gains))


@settings(max_examples=60, deadline=None)
@given(grouped, st.integers(1, 5))
def test_ranking_metrics_equal_plain_loops(rows, k):
    # At most 5 rows a group, so that there are few orders to try.
    counts = {}
    kept = []
    for group, score, label in rows:
        counts[group] = counts.get(group, 0) + 1
        if counts[group] <= 5:
            kept.append((group, score, label))
    groups, scores, labels = map(np.array, zip(*kept, strict=True))
    found = (
        gauc(scores, labels, groups),
        recall_at_k(scores, labels, groups, k),
        ndcg_at_k(scores, labels, groups, k),
    )
    assert found == pytest.approx(plain_ranking(kept, k), rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("k", [1, 3, 10])
def test_ndcg_equals_scikit_learn_with_ties_and_graded_labels(k):
    random = np.random.default_rng(7)
    scores = random.integers(0, 4, (40, 12)).astype(float)
    labels = random.integers(0, 3, (40, 12)).astype(float)
    groups = np.repeat(np.arange(40), 12)
    expected = sk.ndcg_score(labels, scores, k=k)
    found = ndcg_at_k(scores.ravel(), labels.ravel(), groups, k)
    assert found == pytest.approx(expected, rel=1e-9)


def test_gauc_of_one_group_is_the_auc_and_takes_weights():
    p, y, w = clicks(500, 8)
    one = np.zeros(500, int)
    assert gauc(p, y, one) == pytest.approx(auc_estimate(p, y).value, rel=1e-12)
    weighted = GroupRanking(p, y, one, w).gauc().value
    assert weighted == pytest.approx(auc_estimate(p, y, w).value, rel=1e-12)


def test_ranking_does_not_depend_on_the_order_of_rows():
    p, y, _ = clicks(400, 9, decimals=1)
    groups = np.random.default_rng(9).integers(0, 30, 400)
    order = np.random.default_rng(10).permutation(400)
    for metric in (gauc, lambda *a: recall_at_k(*a, 3), lambda *a: ndcg_at_k(*a, 3)):
        shuffled = metric(p[order], y[order], groups[order])
        assert shuffled == pytest.approx(metric(p, y, groups), rel=1e-12)


def test_ranking_refuses_what_it_cannot_rank():
    with pytest.raises(ValueError, match="below 0"):
        GroupRanking(np.ones(2), np.array([1, -1]), np.zeros(2, int))
    with pytest.raises(ValueError, match="at least 1"):
        recall_at_k(np.ones(2), np.ones(2), np.zeros(2, int), 0)
