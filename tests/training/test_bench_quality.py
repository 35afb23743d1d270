"""What the benchmarks of quality compute themselves: AUCs of drawn users, and runs that are kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from tessera.training.bench.clustered import mean_aucs, user_weights, weighted_auc
from tessera.training.bench.quality import Section, report
from tessera.training.bench.trials import Scored, Trials


def test_a_weighted_auc_is_that_of_repeated_rows() -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 200).astype(np.float64)
    scores = random.integers(0, 12, 200) + labels  # many ties
    weights = random.integers(0, 4, (5, 200)).astype(np.float64)
    expected = []
    for own in weights.astype(int):
        repeated = np.repeat(np.arange(200), own)
        expected.append(roc_auc_score(labels[repeated], scores[repeated]))
    np.testing.assert_allclose(weighted_auc(labels, scores, weights), expected, rtol=1e-12)


def test_users_are_drawn_as_wholes() -> None:
    users = np.array([7, 7, 7, 3, 3, 9])
    weights = user_weights(users, draws=50, seed=1)
    assert weights.shape == (50, 6)
    for rows in ([0, 1, 2], [3, 4]):
        assert (weights[:, rows] == weights[:, rows[:1]]).all()
    # As many users as there are, in every draw.
    assert (weights[:, [0, 3, 5]].sum(axis=1) == 3).all()
    assert len(np.unique(weights, axis=0)) > 5
    np.testing.assert_array_equal(weights, user_weights(users, draws=50, seed=1))


def test_the_error_of_users_is_wider_than_that_of_rows() -> None:
    # Every user's rows are copies of one row: drawing rows would pretend to know 25 times as much.
    random = np.random.default_rng(2)
    label = random.integers(0, 2, 60).astype(np.float64)
    score = random.normal(size=60) + label
    users, labels, scores = (np.repeat(part, 25) for part in (np.arange(60), label, score))
    clustered = np.std(mean_aucs(labels, [scores], user_weights(users)))
    of_rows = np.std(mean_aucs(labels, [scores], user_weights(np.arange(1500))))
    assert 3 < clustered / of_rows < 7  # 5 is the square root of 25


def test_a_run_that_is_kept_is_not_run_again(tmp_path: Path) -> None:
    scored = Scored({"valid": np.array([0.1, 0.9])}, {"valid": np.array([0.0, 1.0])})
    calls = []

    def run() -> Scored:
        calls.append(1)
        return scored

    for _ in range(2):
        found = Trials(tmp_path).scored({"arch": "dlrm", "seed": 1}, run)
        assert found is not None
        np.testing.assert_array_equal(found.scores["valid"], scored.scores["valid"])
        assert found.auc("valid") == 1.0
    assert len(calls) == 1
    over = Trials(tmp_path, minutes=0)
    assert over.scored({"arch": "dlrm", "seed": 1}, run) is not None  # it is here already
    assert over.scored({"arch": "dlrm", "seed": 2}, run) is None
    assert len(calls) == 1
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_model_that_diverged_is_as_good_as_chance(broken: float) -> None:
    scored = Scored({"valid": np.array([0.1, broken])}, {"valid": np.array([0.0, 1.0])})
    assert scored.auc("valid") == 0.5


def test_folds_are_compared_in_pairs() -> None:
    # Folds differ by far more than the models do, of which one is better in every fold.
    section = Section("criteo")
    for fold, (ours, theirs) in enumerate([(0.70, 0.71), (0.80, 0.83), (0.60, 0.62)]):
        for model, auc in (("tessera", ours), ("LightGBM", theirs)):
            section.add(model, lambda auc=auc: auc)  # type: ignore[misc]
        assert section.less("LightGBM", "tessera") is None or fold
    found = section.less("LightGBM", "tessera")
    assert found is not None
    assert found == pytest.approx((0.02, 0.01 / np.sqrt(3)))
    assert section.less("tessera", "tessera") is None
    line = next(line for line in report([section]).splitlines() if "LightGBM" in line)
    assert "| +0.0200 ± 0.0058 |" in line
