"""The keys that are searched and what is looked for: how both are read."""

from __future__ import annotations

import re

import pytest

from tessera.errors import UserError
from tessera.training.config import load_config
from tessera.training.tuning.metric import Metric, parse_metric
from tessera.training.tuning.settings import Search
from tessera.training.tuning.space import parse_dimension, read_space
from tests.trainer.tiny_runs import TINY

FILE = """
train.dense_optimizer.learning_rate: log_uniform(1e-4, 1e-2)
model:
  dropout: uniform(0, 0.5)
  over_layers: [[64], [128, 64]]
  embedding_dim: log_int(4, 64)
"""


def test_a_file_may_be_nested_and_a_flag_wins(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text(FILE)
    rate, dropout, layers, dim, epochs = read_space(
        path, ["model.dropout=[0.1, 0.2]", "train.epochs=int(1, 3)"]
    )
    assert (rate.key, rate.kind, rate.bounds) == (
        "train.dense_optimizer.learning_rate",
        "log_uniform",
        (1e-4, 1e-2),
    )
    assert (dropout.key, dropout.choices) == ("model.dropout", ("0.1", "0.2"))
    assert layers.choices == ("[64]", "[128, 64]")
    assert (dim.kind, dim.bounds, dim.is_log) == ("log_int", (4, 64), True)
    assert epochs.bounds == (1, 3)
    assert layers.override("[128, 64]") == "model.over_layers=[128, 64]"
    assert rate.override(0.001) == "train.dense_optimizer.learning_rate=0.001"
    for own in (rate, dropout, layers, dim, epochs):
        (again,) = read_space(None, [f"{own.key}={own.text}"])
        assert again == own


def test_the_config_s_own_value_is_found_where_the_space_holds_it():
    layers = parse_dimension("a", [[64], [128, 64]], "x")
    assert layers.value_in({"a": "[128,  64]"}) == "[128, 64]"
    assert layers.value_in({"a": "[1]"}) is None
    rate = parse_dimension("a", "uniform(0, 1)", "x")
    assert [rate.value_in({"a": text}) for text in ("0.5", "2", "true", "null")] == [
        0.5,
        None,
        None,
        None,
    ]
    assert rate.value_in({}) is None


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ("model.dropout", "--over 'model.dropout': give KEY=VALUES, such as"),
        ("a=3", "--over 'a=3': a=3: give a list of choices, or uniform(LOW, HIGH)"),
        ("a=normal(0, 1)", "give a list of choices, or uniform(LOW, HIGH)"),
        ("a=uniform(0)", "give two numbers, low and high"),
        ("a=uniform(x, 1)", "give two numbers, low and high"),
        ("a=uniform(1, 1)", "the first number must be below the second"),
        ("a=uniform(0, inf)", "the first number must be below the second"),
        ("a=log_uniform(0, 1)", "a logarithmic scale begins above 0"),
        ("a=int(0, 1.5)", "give two integers"),
        ("a=[1]", "give two or more different choices"),
        ("a=[1, 1]", "give two or more different choices"),
        ("a=[1", "--over 'a=[1': "),
    ],
)
def test_a_wrong_range_is_refused_in_one_line(over, message):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        read_space(None, [over])
    assert "\n" not in str(caught.value)


def test_a_search_over_nothing_is_refused():
    with pytest.raises(UserError, match="name a key"):
        read_space(None, [])


@pytest.mark.parametrize(
    ("text", "metric"),
    [
        ("auc", Metric(name="auc")),
        ("valid.log_loss", Metric(name="log_loss")),
        ("valid.click.auc", Metric(name="auc", label="click")),
        ("click.loss", Metric(name="loss", label="click")),
    ],
)
def test_a_metric_is_read(text, metric):
    assert parse_metric(text) == metric
    assert parse_metric(metric.text) == metric


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("test.auc", "settings are never chosen by the test rows"),
        ("test", "give valid.auc"),
        ("acu", "did you mean auc?"),
        ("calibration", "--metric is 'calibration'; give one of auc, loss"),
    ],
)
def test_a_metric_that_cannot_be_searched_for_is_refused(text, message):
    with pytest.raises(UserError, match=re.escape(message)):
        parse_metric(text)


def test_the_value_of_a_metric():
    final = {"valid": {"auc": 0.7, "log_loss": 0.5, "r_squared": None}, "test": {"auc": 0.9}}
    assert parse_metric("auc").of_final(final) == 0.7
    assert parse_metric("loss").of_final(final) == 0.5
    assert parse_metric("r_squared").of_final(final) is None
    with pytest.raises(UserError, match=r"no such metric; give one of valid\.auc, valid\.log_loss"):
        parse_metric("click.auc").of_final(final)
    rows = [
        {"split": "train", "label": "", "loss": "3", "auc": ""},
        {"split": "valid", "label": "", "loss": "2", "auc": "0.5"},
        {"split": "valid", "label": "click", "loss": "1", "auc": ""},
        {"split": "valid", "label": "", "loss": "1.5", "auc": "0.6"},
    ]
    assert parse_metric("auc").of_rows(rows) == [0.5, 0.6]
    assert parse_metric("click.log_loss").of_rows(rows) == [1.0]
    assert (parse_metric("auc").direction, parse_metric("loss").direction) == (
        "maximize",
        "minimize",
    )


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "base.yaml"
    path.write_text(TINY.replace("PATH", "clicks.tsv"))
    return path


def search(*over, metric="auc", prune="none", folder="."):
    return Search(
        space=tuple(read_space(None, over)),
        metric=parse_metric(metric),
        seed=3,
        prune=prune,
        folder=folder,
    )


def test_a_search_is_what_its_file_says(tmp_path):
    made = search("a.b=[[1], [2, 3]]", "c=log_int(1, 9)", "d=uniform(0, 1)", metric="x.auc")
    path = tmp_path / "search.json"
    path.write_text(made.to_json())
    assert Search.from_json(path) == made
    path.write_text("{}")
    with pytest.raises(UserError, match="is damaged"):
        Search.from_json(path)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ("model.droput=uniform(0, 0.5)", "did you mean model.dropout?"),
        ("model.dropout=uniform(0, 1)", "dropout=1.0: give a share from 0 to below 1"),
        ("model.embedding_dim=uniform(1, 2)", "model.embedding_dim=1.0: expected an integer"),
        ("train.schedule.kind=[linear, cubic]", "expected 'constant' or 'linear' or 'cosine'"),
    ],
)
def test_values_that_the_config_does_not_take_are_refused_before_anything_runs(base, over, message):
    with pytest.raises(UserError, match=re.escape(message)):
        search(over).check(base)


def test_a_trial_s_config_is_chosen_by_what_is_searched_for(base, tmp_path):
    made = search("model.dropout=uniform(0, 0.5)", metric="log_loss", folder=str(tmp_path))
    config = made.config(base, {"model.dropout": 0.25})
    assert (config.train.metric, config.model.dropout) == ("log_loss", 0.25)
    assert config.data.path == str(tmp_path / "clicks.tsv")
    assert load_config(base).train.metric == "auc"


def test_pruning_needs_a_metric_that_is_logged():
    with pytest.raises(UserError, match=r"metrics\.csv has no valid\.mean_absolute_error"):
        search("a=[1, 2]", metric="mean_absolute_error", prune="median")
