from __future__ import annotations

import dataclasses

import pytest

from tessera.errors import UserError
from tessera.training.config import (
    SHIPPED_CONFIGS,
    ExperimentConfig,
    TrainConfig,
    find_config,
    load_config,
    resume_conflicts,
)

CONFIG = """
data: {format: criteo, path: [a.tsv, b.tsv]}
model:
  tables:
    C1: {rows: 7}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(CONFIG)
    return path


def test_relative_paths_are_taken_from_the_base(file, tmp_path, monkeypatch):
    config = load_config(file, ["data.valid_path=c.tsv"], base=tmp_path / "elsewhere")
    assert config.data.path == (
        str(tmp_path / "elsewhere" / "a.tsv"),
        str(tmp_path / "elsewhere" / "b.tsv"),
    )
    assert config.data.valid_path == str(tmp_path / "elsewhere" / "c.tsv")
    monkeypatch.chdir(tmp_path)
    assert load_config(file).data.path == (str(tmp_path / "a.tsv"), str(tmp_path / "b.tsv"))


def test_the_resolved_config_round_trips(file, tmp_path):
    config = load_config(file, ["train.epochs=3", "train.eval_every_steps=5"])
    (tmp_path / "resolved.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "resolved.yaml", base=tmp_path / "other") == config
    assert ExperimentConfig.from_plain(config.to_plain(), name="test") == config


@pytest.mark.parametrize("path", sorted(SHIPPED_CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_that_comes_along_is_valid_and_found_by_name(path):
    assert find_config(path.stem) == path
    assert load_config(path) == load_config(find_config(str(path)))


def test_a_file_is_found_before_a_shipped_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").write_text(CONFIG)
    assert find_config("demo").read_text() == CONFIG
    with pytest.raises(UserError, match=r"--config nope: no such file, nor .*demo"):
        find_config("nope")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batch_size=0", "batch_size=0: give at least 1"),
        ("train.epochs=-1", "epochs=-1: give at least 1"),
        ("train.eval_every_steps=0", "eval_every_steps=0: give at least 1"),
        ("train.patience=0", "patience=0: give at least 1"),
        ("train.keep_checkpoints=0", "keep_checkpoints=0: give at least 1"),
        ("train.threads=0", "threads=0: give at least 1"),
        ("train.threads=5000", "threads=5000: give at most 4096"),
        ("train.seed=9223372036854775808", "9223372036854775808' does not fit into 64 bits"),
        ("train.log_every_steps=0", "log_every_steps=0: give at least 1"),
        ("train.seed=-1", "seed=-1: give 0 or a number above it"),
        ("train.metric=f1", "train.metric='f1': expected 'auc' or 'log_loss'"),
        ("train.dense_optimizer.learning_rate=0", "learning_rate=0.0: give a number above 0"),
        ("train.dense_optimizer.learning_rate=.nan", "learning_rate=nan: give a number above 0"),
        ("train.dense_optimizer.weight_decay=-1", "weight_decay=-1.0: give 0 or a number above"),
        ("train.dense_optimizer.name=lion", "expected 'adam' or 'adamw' or 'adagrad' or 'sgd'"),
        ("train.embedding_optimizer={name: sgd, eps: 1}", "eps=1.0: sgd has no eps; leave it out"),
        ("train.schedule.warmup_steps=-1", "warmup_steps=-1: give 0 or a number above it"),
        ("train.schedule.final_factor=0.5", "final_factor=0.5: a constant schedule has no end"),
        (
            "train.schedule={kind: linear, final_factor: 2}",
            "final_factor=2.0: give a factor from 0 to 1",
        ),
        ("train.lr=1", "unknown key train.lr"),
        ("train.epoch=1", "unknown key train.epoch; did you mean train.epochs?"),
        ("run.name=a/b", "name='a/b': give a folder's name"),
        ("model.tables.C1.rows=0", "in section 'model.tables.C1': rows=0"),
        ("data.valid_fraction=1.5", "in section 'data': valid_fraction=1.5"),
    ],
)
def test_a_bad_value_says_where_what_and_how(file, override, message):
    with pytest.raises(UserError) as caught:
        load_config(file, [override])
    assert str(caught.value).startswith(f"override '{override}': ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_seed_that_torch_does_not_take_is_refused_from_python_as_well():
    with pytest.raises(UserError, match="seed=9223372036854775808: give at most 92233720"):
        TrainConfig(seed=2**63)


def test_what_may_change_on_resume(file):
    stored = load_config(file)
    free = [
        "run.name=x",
        "run.report=false",
        "data.cache_dir=/c",
        "data.workers=0",
        "train.checkpoint_every_steps=4",
        "train.keep_checkpoints=9",
    ]
    assert resume_conflicts(stored, load_config(file, free)) == []
    binding = ["train.seed=1", "model.tables.C1.rows=8", "data.split_seed=2", "train.epochs=9"]
    assert set(resume_conflicts(stored, load_config(file, binding))) == {
        "train.seed",
        "model.tables.C1.rows",
        "data.split_seed",
        "train.epochs",
    }


def test_configs_cannot_be_changed(file):
    config = load_config(file)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.epochs = 3
