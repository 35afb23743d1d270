from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.training.config import ScheduleConfig
from tessera.training.distributed.checkpoint.basics import CheckpointError
from tessera.training.trainer.metrics import Evaluation
from tessera.training.trainer.progress import Progress
from tessera.training.trainer.split_metrics import SplitEvaluation


def factors(total, **schedule):
    config = ScheduleConfig(**schedule)
    return [config.factor(step=step, total_steps=total) for step in range(total)]


def test_constant_is_one():
    assert factors(4) == [1.0] * 4


def test_linear_by_hand():
    assert factors(7, kind="linear", warmup_steps=2, final_factor=0.2) == pytest.approx(
        [1 / 3, 2 / 3, 1.0, 0.8, 0.6, 0.4, 0.2]
    )


def test_cosine_by_hand():
    half = (1 + math.cos(math.pi / 4)) / 2
    assert factors(5, kind="cosine") == pytest.approx([1.0, half, 0.5, 1 - half, 0.0])


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(1, 60),
    st.integers(0, 80),
)
def test_rises_through_the_warm_up_and_never_again(kind, total, warmup):
    found = factors(total, kind=kind, warmup_steps=warmup)
    assert all(0 <= factor <= 1 for factor in found)
    assert found[:warmup] == sorted(found[:warmup])
    assert found[warmup:] == sorted(found[warmup:], reverse=True)
    if warmup < total:
        assert found[warmup] == 1.0


def evaluation(auc=0.5, log_loss=0.6):
    found = Evaluation(
        rows=10, positives=4, auc=auc, log_loss=log_loss, normalised_entropy=0.9, calibration=1.0
    )
    return SplitEvaluation(by_label={"label": found}, loss=log_loss)


def run_of(metric, values):
    progress, better = Progress(), []
    for value in values:
        progress.count_step(samples=4)
        progress.count_loss(0.5)
        better.append(progress.count_evaluation(evaluation(**{metric: value}), metric=metric))
    return progress, better


@pytest.mark.parametrize(
    ("metric", "values", "better", "best_step", "since"),
    [
        ("auc", [0.6, 0.7, 0.7, 0.65], [True, True, False, False], 2, 2),
        ("log_loss", [0.6, 0.7, 0.5, 0.5], [True, False, True, False], 3, 1),
        ("auc", [math.nan, math.nan, 0.4, math.nan], [True, False, True, False], 3, 1),
    ],
)
def test_best_evaluation_and_patience(metric, values, better, best_step, since):
    progress, found = run_of(metric, values)
    assert found == better
    assert progress.best_step == best_step
    assert progress.best_metric == values[best_step - 1]
    assert progress.evaluations_since_best == since


def test_mean_loss_is_of_the_steps_since_the_last_call():
    progress = Progress()
    for loss in (1.0, 2.0):
        progress.count_step(samples=3)
        progress.count_loss(loss)
    assert progress.take_mean_loss() == 1.5
    progress.count_step(samples=1)
    progress.count_loss(5.0)
    assert progress.take_mean_loss() == 5.0
    assert (progress.step, progress.batch, progress.samples) == (3, 3, 7)


def test_plain_form_round_trips_and_a_missing_field_is_named():
    progress, _ = run_of("auc", [0.6, 0.7])
    assert Progress.from_plain(progress.to_plain(), Path("x.pt")) == progress
    plain = progress.to_plain()
    del plain["best_step"]
    with pytest.raises(CheckpointError, match=r"x\.pt does not fit .* lacks best_step"):
        Progress.from_plain(plain, Path("x.pt"))
