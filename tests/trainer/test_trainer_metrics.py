from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from tessera.training.metrics.binary import auc, sigmoid
from tessera.training.trainer.metrics import BinaryMetrics, evaluate_probabilities

# Few distinct scores make ties, the hard case; extreme ones make sigmoid saturate.
scores = st.sampled_from([-90.0, -2.0, -0.5, 0.0, 0.25, 3.0, 90.0])
rows = st.lists(st.tuples(scores, st.integers(0, 1)), min_size=2, max_size=60).filter(
    lambda pairs: len({label for _, label in pairs}) == 2
)


def collect(logits, labels, *, batch):
    metrics = BinaryMetrics(len(logits))
    for start in range(0, len(logits), batch):
        part = slice(start, start + batch)
        metrics.update(torch.tensor(logits[part]), torch.tensor(labels[part]))
    return metrics


@given(rows, st.integers(1, 70))
def test_streamed_metrics_equal_scikit_learn(pairs, batch):
    logits = np.array([logit for logit, _ in pairs], dtype=np.float32)
    labels = np.array([label for _, label in pairs], dtype=np.float32)
    found = collect(logits, labels, batch=batch).compute()
    # Not clipped: in float64 a logit of 90 is a probability below 1 by less than its resolution,
    # so the reference takes the logarithm of the sigmoid of the signed logit.
    signed = np.where(labels == 1, logits, -logits).astype(np.float64)
    expected_loss = float(np.mean(np.logaddexp(0.0, -signed)))
    rate = labels.mean(dtype=np.float64)
    entropy = log_loss(labels, np.full(len(labels), rate))
    assert found.rows == len(pairs)
    assert found.positives == labels.sum()
    # Both count pairs; scikit-learn sums trapezoids in float64, so its last bits differ.
    assert found.auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)
    assert found.log_loss == pytest.approx(expected_loss, rel=1e-12)
    assert found.normalised_entropy == pytest.approx(expected_loss / entropy, rel=1e-9)
    expected = sigmoid(logits).sum() / labels.sum()
    assert found.calibration == pytest.approx(expected, rel=1e-12)


def test_against_scikit_learn_on_many_rows():
    random = np.random.default_rng(3)
    logits = np.round(random.normal(size=20_000) * 4, 1).astype(np.float32)
    labels = (random.random(20_000) < sigmoid(logits * 0.7)).astype(np.float32)
    found = collect(logits, labels, batch=777).compute()
    assert found.auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)
    assert found.log_loss == pytest.approx(log_loss(labels, sigmoid(logits)), rel=1e-9)
    by_probability = evaluate_probabilities(sigmoid(logits), labels)
    assert by_probability.log_loss == pytest.approx(found.log_loss, rel=1e-9)
    assert by_probability.auc == found.auc
    assert by_probability.calibration == pytest.approx(found.calibration, rel=1e-12)


def test_probabilities_of_zero_and_one_keep_the_loss_finite():
    found = evaluate_probabilities(np.float32([0.0, 1.0, 0.5]), np.array([1, 0, 1]))
    assert math.isfinite(found.log_loss)
    assert found.log_loss > 5


@given(rows, st.randoms(use_true_random=False))
def test_auc_does_not_depend_on_the_order_of_rows(pairs, random):
    shuffled = list(pairs)
    random.shuffle(shuffled)

    def of(some):
        return auc(np.array([p[0] for p in some]), np.array([p[1] for p in some]))

    assert of(pairs) == of(shuffled)


@pytest.mark.parametrize(
    ("scores", "labels", "expected"),
    [
        ([0.0, 1.0], [0, 1], 1.0),
        ([1.0, 0.0], [0, 1], 0.0),
        ([1.0, 1.0], [0, 1], 0.5),
        ([0.0, 1.0, 1.0, 2.0], [0, 0, 1, 1], 0.875),
    ],
)
def test_auc_by_hand(scores, labels, expected):
    assert auc(np.array(scores), np.array(labels)) == expected


@pytest.mark.parametrize("labels", [[], [0.0], [1.0, 1.0]])
def test_what_is_not_defined_is_nan_and_none_in_json(labels):
    found = collect(np.zeros(len(labels), np.float32), np.float32(labels), batch=2).compute()
    assert math.isnan(found.auc)
    assert math.isnan(found.normalised_entropy)
    assert found.to_json()["auc"] is None
    assert found.to_json()["rows"] == len(labels)
