"""Standard errors against a plain cluster bootstrap, and by how often their intervals hold the truth."""

import math

import numpy as np
import pytest

from tessera.training.metrics.binary import BINARY_METRICS, sigmoid
from tessera.training.metrics.estimate import codes_of, mean_of
from tessera.training.metrics.ranking import GroupRanking
from tessera.training.metrics.regression import REGRESSION_METRICS

METRICS = tuple(BINARY_METRICS)


def binary_estimates(p, y, w=None):
    return {name: metric(p, y, w) for name, metric in BINARY_METRICS.items()}


def regression_estimates(p, y, w=None):
    return {name: metric(p, y, w) for name, metric in REGRESSION_METRICS.items()}


def users_clicks(users, seed, *, rows=(5, 40)):
    """Rows of users whose clicks and predictions go together: (two predictions, labels, users)."""
    random = np.random.default_rng(seed)
    counts = random.integers(*rows, users)
    user = np.repeat(np.arange(users), counts)
    own = random.normal(size=users)[user]  # what no model knows of a user
    signal = random.normal(size=len(user)) + 0.7 * random.normal(size=users)[user]
    labels = (random.random(len(user)) < sigmoid(signal + own - 1)).astype(np.float32)
    noise = random.normal(size=(2, len(user)))
    first = sigmoid(signal - 1 + 0.3 * noise[0]).astype(np.float32)
    second = sigmoid(0.9 * signal - 1 + 0.5 * noise[1]).astype(np.float32)
    return first, second, labels, user


def all_metrics(p, y, user):
    ranking = GroupRanking(p, y, user)
    return {
        **binary_estimates(p, y),
        **regression_estimates(p, y),
        "gauc": ranking.gauc(),
        "recall": ranking.recall_at_k(3),
        "ndcg": ranking.ndcg_at_k(3),
    }


def bootstrapped(users, repeats=250, seed=0):
    """Users drawn with replacement, each draw a user of its own."""
    first, second, labels, user = users
    random = np.random.default_rng(seed)
    rows_of = np.split(np.arange(len(user)), np.flatnonzero(np.diff(user)) + 1)
    values, differences = {}, {}
    for _ in range(repeats):
        drawn = random.integers(0, len(rows_of), len(rows_of))
        rows = np.concatenate([rows_of[one] for one in drawn])
        new = np.repeat(np.arange(len(drawn)), [len(rows_of[one]) for one in drawn])
        a, b = (all_metrics(p[rows], labels[rows], new) for p in (first, second))
        for name in a:
            values.setdefault(name, []).append(a[name].value)
            differences.setdefault(name, []).append(a[name].value - b[name].value)
    return tuple({n: np.std(v, ddof=1) for n, v in each.items()} for each in (values, differences))


def test_clustered_and_paired_errors_are_those_of_a_cluster_bootstrap():
    users = users_clicks(400, 1)
    first, second, labels, user = users
    a, b = (all_metrics(p, labels, user) for p in (first, second))
    errors, paired = bootstrapped(users)
    # The bootstrap's own error with 250 draws is 4.5%; three of them, and some for first order.
    for name, found in a.items():
        assert found.standard_error(user) == pytest.approx(errors[name], rel=0.15), name
        difference = found.minus(b[name])
        assert difference.standard_error(user) == pytest.approx(paired[name], rel=0.15), name
    # What clustering and pairing are for: of this data both change the error by far.
    assert a["log_loss"].standard_error(user) > 1.2 * a["log_loss"].standard_error()
    alone = math.hypot(a["auc"].standard_error(user), b["auc"].standard_error(user))
    assert a["auc"].minus(b["auc"]).standard_error(user) < 0.6 * alone


def test_intervals_hold_the_truth_as_often_as_they_say():
    """A 95% interval misses 12 of 250 samples on average; 4 binomial deviations more are allowed."""
    one, two, clicked, people = users_clicks(20_000, 99)
    truth, other = all_metrics(one, clicked, people), all_metrics(two, clicked, people)
    samples = 250
    hit = dict.fromkeys([*METRICS, "gauc", "recall", "ndcg"], 0)
    hit_paired, hit_rows = dict(hit), dict(hit)
    for seed in range(samples):
        first, second, labels, user = users_clicks(120, 1000 + seed)
        a, b = all_metrics(first, labels, user), all_metrics(second, labels, user)
        for name in hit:
            off = abs(a[name].value - truth[name].value)
            hit[name] += off < 1.96 * a[name].standard_error(user)
            hit_rows[name] += off < 1.96 * a[name].standard_error()
            wanted = truth[name].value - other[name].value
            difference = a[name].minus(b[name])
            off = abs(difference.value - wanted)
            hit_paired[name] += off < 1.96 * difference.standard_error(user)
    spread = math.sqrt(samples * 0.95 * 0.05)
    for name, count in {**hit, **{f"{n}, paired": c for n, c in hit_paired.items()}}.items():
        # 120 clusters are few: normal quantiles and first order may cost some hundredths.
        assert 0.93 * samples - 4 * spread < count <= 0.96 * samples + 4 * spread, name
    # Rows taken for independent promise too much.
    assert hit_rows["log_loss"] < hit["log_loss"] - 4 * spread


def test_rows_as_clusters_give_the_usual_error_of_a_mean():
    x = np.random.default_rng(4).normal(size=500)
    found = mean_of(x)
    expected = np.std(x, ddof=1) / math.sqrt(500)
    assert found.standard_error() == pytest.approx(expected)
    assert found.standard_error(np.arange(500)) == pytest.approx(expected)


def test_repeating_every_row_in_its_cluster_changes_no_error():
    first, _, labels, user = users_clicks(50, 5)
    once = binary_estimates(first, labels)
    twice = binary_estimates(np.tile(first, 2), np.tile(labels, 2))
    for name in METRICS:
        expected = once[name].standard_error(user)
        assert twice[name].standard_error(np.tile(user, 2)) == pytest.approx(expected), name


def test_one_cluster_says_nothing_of_the_error():
    assert math.isnan(mean_of(np.arange(5.0)).standard_error(np.zeros(5, int)))
    assert math.isnan(mean_of(np.arange(1.0)).standard_error())


def test_codes_are_numbers_from_0_without_gaps():
    assert codes_of(np.array([7, -3, 7, 100])).tolist() == [1, 0, 1, 2]
    assert codes_of(np.array(["b", "a", "b"])).tolist() == [1, 0, 1]
