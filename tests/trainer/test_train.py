from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from tessera.cli import main
from tessera.errors import UserError
from tessera.training.config import load_config
from tessera.training.data import open_data
from tessera.training.data.columns import LabelColumn
from tessera.training.distributed.checkpoint.basics import CheckpointError
from tessera.training.trained import load_trained, validation_batches
from tessera.training.trainer import train
from tessera.training.trainer.assembly import assemble
from tessera.training.trainer.checkpoint import load_checkpoint
from tessera.training.trainer.files import list_checkpoints
from tessera.training.trainer.logs import read_metrics
from tessera.training.trainer.loop import DivergedError
from tessera.training.trainer.metrics import BinaryMetrics
from tessera.training.trainer.ranks import Ranks
from tessera.training.trainer.run_folder import RunFolder
from tessera.training.transforms.description import plain_transforms
from tessera.training.transforms.fitting import Fitted
from tessera.training.transforms.preprocessor import FittedSizes
from tests.trainer.tiny_runs import changed, write_criteo


@pytest.fixture
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished(tiny_yaml, tmp_path_factory):
    """A finished run with every file."""
    out = tmp_path_factory.mktemp("finished") / "run"
    config = load_config(tiny_yaml, ["run={}", "train.eval_every_steps=5"])
    return train(config, out, progress=False)


def test_a_run_folder_has_everything(finished):
    folder = RunFolder(finished.folder)
    assert load_config(folder.config).data.format == "criteo"
    assert list(folder.tensorboard.iterdir())
    assert "<svg" in folder.report.read_text()
    final = json.loads(folder.final.read_text())
    assert final == finished.final
    for split, rows in (("valid", 40), ("test", 40)):
        assert final[split]["rows"] == rows
        assert set(final[split]) == {
            "rows",
            "positives",
            "auc",
            "normalised_entropy",
            "log_loss",
            "calibration",
        }
    assert final["samples"] == 2 * 320
    assert final["malformed_rows"] == 0


def test_the_best_and_the_last_checkpoint_are_kept(finished):
    folder = RunFolder(finished.folder)
    aucs = {
        int(row["step"]): float(row["auc"])
        for row in read_metrics(folder.metrics)
        if row["split"] == "valid"
    }
    assert list(aucs) == [5, 10, 15, 20, 25, 30, 35, 40]
    best = max(aucs, key=lambda step: (aucs[step], -step))
    assert set(list_checkpoints(folder.checkpoints)) == {best, 40}
    assert finished.best_checkpoint == list_checkpoints(folder.checkpoints)[best]
    assert finished.final["best_step"] == best
    # The final evaluation is of the best weights, so it says what the log said of them.
    assert finished.final["valid"]["auc"] == aucs[best]


def test_training_learns(finished):
    losses = [
        float(row["loss"])
        for row in read_metrics(RunFolder(finished.folder).metrics)
        if row["split"] == "train"
    ]
    assert sum(losses[-10:]) < 0.97 * sum(losses[:10])


def metrics_of(model, batches, rows):
    metrics = BinaryMetrics(rows)
    with torch.no_grad():
        for batch in batches:
            metrics.update(model(batch.dense_features, batch.sparse_features), batch.labels)
    return metrics.compute()


def test_load_trained_gives_the_best_model_from_anywhere(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = load_trained(finished.folder)
    assert trained.checkpoint_path == finished.best_checkpoint
    assert trained.step == finished.final["best_step"]
    assert trained.metrics == {name: finished.final[name] for name in ("valid", "test")}
    assert not trained.model.training
    found = metrics_of(trained.model, validation_batches(trained, 7), rows=40)
    # Plain tables add in another order than fused ones: equal to float32's resolution.
    assert found.log_loss == pytest.approx(finished.final["valid"]["log_loss"], rel=1e-5)
    assert found.auc == pytest.approx(finished.final["valid"]["auc"], abs=1e-3)


def test_load_trained_takes_a_checkpoint_file(finished):
    last = list_checkpoints(RunFolder(finished.folder).checkpoints)[40]
    trained = load_trained(last)
    assert trained.step == 40
    stored = load_checkpoint(last).model
    assert set(trained.model.state_dict()) == set(stored)
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(tensor, stored[name]), name


def test_load_trained_says_what_is_missing(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint; give a run folder"):
        load_trained(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_trained(tmp_path / "absent.pt")


def test_load_trained_of_an_unfinished_run(tiny, tmp_path):
    out = tmp_path / "run"
    train(tiny, out, progress=False, should_stop=lambda: True)
    trained = load_trained(out)
    assert trained.step == 1
    assert trained.metrics == {}


def test_train_leaves_torch_as_it_was(tiny, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = torch.get_rng_state()
        train(changed(tiny, epochs=1), tmp_path / "run", progress=False)
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_two_threads_are_as_repeatable_as_one(tiny, tmp_path):
    config = changed(tiny, threads=2, epochs=1)
    logs = []
    for name in ("a", "b"):
        train(config, tmp_path / name, progress=False)
        rows = read_metrics(tmp_path / name / "metrics.csv")
        logs.append([row["loss"] for row in rows])
    assert logs[0] == logs[1]


def test_patience_ends_a_run_that_gets_no_better(tiny_yaml, tmp_path):
    config = load_config(
        tiny_yaml,
        [
            # Too small to change a float32 weight, so every evaluation is the same.
            "train.dense_optimizer={name: sgd, learning_rate: 1e-30}",
            "train.embedding_optimizer={name: sgd, learning_rate: 1e-30}",
            "train.patience=2",
        ],
    )
    result = train(config, tmp_path / "run", progress=False)
    assert result.status == "finished"
    assert result.final["best_step"] == 9
    assert result.step == 20, "evaluations at 9 (best), 18, and 20, the end of the epoch"


def test_a_loss_that_is_not_finite_stops_the_run(tiny_yaml, tmp_path):
    config = load_config(
        tiny_yaml,
        [
            "train.dense_optimizer={name: sgd, learning_rate: 1e30}",
            "train.schedule={}",
            "train.checkpoint_every_steps=1",
        ],
    )
    out = tmp_path / "run"
    with pytest.raises(
        DivergedError, match=r"the loss of step \d+ .* lower train\.dense_optimizer"
    ):
        train(config, out, progress=False)
    last = load_checkpoint(max(list_checkpoints(RunFolder(out).checkpoints).values()))
    assert math.isfinite(last.progress["loss_sum"])


@pytest.mark.parametrize("name", ["adam", "adamw", "adagrad", "sgd"])
def test_every_dense_optimizer_resumes_exactly(tiny_yaml, tmp_path, name):
    tables = {"adamw": "adagrad", "sgd": "sgd"}.get(name, "rowwise_adagrad")
    config = load_config(
        tiny_yaml,
        [
            f"train.dense_optimizer={{name: {name}, learning_rate: 0.01, weight_decay: 0.01}}",
            f"train.embedding_optimizer={{name: {tables}, learning_rate: 0.1, weight_decay: 0.01}}",
            "train.epochs=1",
        ],
    )
    train(config, tmp_path / "a", progress=False)
    calls = iter(range(1000))
    stopped = train(config, tmp_path / "b", progress=False, should_stop=lambda: next(calls) >= 4)
    assert (stopped.status, stopped.step) == ("interrupted", 5)
    train(config, tmp_path / "b", resume=True, progress=False)
    losses = [[row["loss"] for row in read_metrics(tmp_path / run / "metrics.csv")] for run in "ab"]
    assert losses[0] == losses[1]


def test_resume_refuses_another_config_and_names_the_keys(tiny, tmp_path):
    out = tmp_path / "run"
    train(tiny, out, progress=False, should_stop=lambda: True)
    other = changed(tiny, batch_size=8, seed=3)
    with pytest.raises(UserError, match=r"differs .* in train\.batch_size, train\.seed; give"):
        train(other, out, resume=True, progress=False)
    with pytest.raises(UserError, match="add --resume"):
        train(tiny, out, progress=False)
    allowed = changed(tiny, keep_checkpoints=3)
    assert train(allowed, out, resume=True, progress=False).status == "finished"


def test_resume_refuses_data_that_changed(tiny_yaml, tmp_path):
    data = write_criteo(tmp_path / "own.tsv", rows=200)
    config = load_config(tiny_yaml, [f"data.path={data}"])
    out = tmp_path / "run"
    train(config, out, progress=False, should_stop=lambda: True)
    write_criteo(data, rows=300)
    with pytest.raises(UserError, match="the data has changed"):
        train(config, out, resume=True, progress=False)


def test_resume_says_which_checkpoint_is_damaged(tiny, tmp_path):
    out = tmp_path / "run"
    train(tiny, out, progress=False, should_stop=lambda: True)
    (path,) = list_checkpoints(out / "checkpoints").values()
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=path.name):
        train(tiny, out, resume=True, progress=False)


@pytest.mark.parametrize(
    ("rows", "override", "message"),
    [
        (200, "data.valid_fraction=0", "there are no validation rows"),
        (0, "data.workers=0", "no line of it is a row"),
    ],
)
def test_splits_that_cannot_be_trained_on(tiny_yaml, tmp_path, rows, override, message):
    data = write_criteo(tmp_path / "own.tsv", rows=rows)
    config = load_config(tiny_yaml, [f"data.path={data}", override])
    with pytest.raises(UserError, match=message):
        train(config, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists(), "a run that cannot begin leaves nothing in the way"


def test_malformed_rows_are_counted_in_the_result(tiny_yaml, tmp_path):
    data = write_criteo(tmp_path / "own.tsv", rows=200)
    with data.open("a") as stream:
        stream.write("2\tnot a row\n")
    config = load_config(tiny_yaml, [f"data.path={data}", "train.epochs=1"])
    assert train(config, tmp_path / "run", progress=False).final["malformed_rows"] == 1


def test_one_label_has_no_auc_but_a_log_loss(tiny_yaml, tmp_path):
    data = tmp_path / "own.tsv"
    lines = write_criteo(data, rows=200).read_text().splitlines()
    data.write_text("".join(f"0{line[1:]}\n" for line in lines))
    config = load_config(tiny_yaml, [f"data.path={data}", "train.epochs=1"])
    with pytest.raises(UserError, match=r"set train\.metric=log_loss"):
        train(config, tmp_path / "run", progress=False)
    result = train(changed(config, metric="log_loss"), tmp_path / "run", progress=False)
    assert result.final["valid"]["auc"] is None


def test_ranks_that_do_not_know_themselves_are_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"WORLD_SIZE=2, but RANK is not set; start .* torchrun"):
        train(tiny, tmp_path / "run", progress=False)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(UserError, match="WORLD_SIZE=many: give the number"):
        train(tiny, tmp_path / "run", progress=False)


def test_the_command_trains_under_one_rank(tiny_yaml, tmp_path, monkeypatch, capsys):
    for name, value in (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "--config", str(tiny_yaml), "train.epochs=1", "run.name=mine"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("mine-")
    assert captured.out.startswith("finished: best step")
    assert "step 20: AUC" in captured.err
    assert len(open_data(load_config(run / "config.yaml").data, progress=False).train) == 320


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--config is missing"),
        (["--config", "nope"], "--config nope: no such file"),
        (["--config", "TINY", "train.epoch=1"], "did you mean train.epochs?"),
        (["--config", "TINY", "data.path=absent.tsv"], "absent.tsv"),
        (["--config", "TINY", "model.tables.X1.rows=3"], "in section 'model': tables.X1"),
        (["--resume"], "say which run with --out"),
        (["--resume", "--out", "absent"], "there is no run in absent"),
        (["--config", "TINY", "--out", "DATA"], "is not empty and holds no run"),
    ],
)
def test_a_wrong_command_ends_with_2_and_one_line(
    tiny_yaml, working_folder, capsys, arguments, message
):
    names = {"TINY": str(tiny_yaml), "DATA": str(tiny_yaml.parent)}
    assert main(["train", *(names.get(word, word) for word in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("tessera train: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_fresh_weights_begin_at_the_share_of_positive_labels(tiny_yaml):
    config = load_config(tiny_yaml)
    assembly = assemble(
        config,
        transforms=plain_transforms(["I1"], ["C1"]),
        fitted=Fitted(sizes=FittedSizes(), state={}),
        labels=(LabelColumn(name="label"),),
        ranks=Ranks(),
        device=torch.device("cpu"),
    )
    assembly.begin_at([0.2])
    last = [module for module in assembly.model.modules() if isinstance(module, nn.Linear)][-1]
    assert torch.sigmoid(last.bias).item() == pytest.approx(0.2, abs=1e-6)


def test_a_table_that_cannot_be_trained_is_one_clear_line(tiny_yaml, tmp_path, capsys):
    out, override = tmp_path / "run", "model.tables={C1: {table: items}}"
    assert main(["train", "--config", str(tiny_yaml), override, "--out", str(out), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert "table name 'items' is a word that torch's modules" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "name", ["adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb", "lars_sgd", "lion"]
)
def test_every_table_optimizer_trains_rows_of_any_length(tiny_yaml, tmp_path, name):
    overrides = [f"train.embedding_optimizer={{name: {name}, learning_rate: 0.01}}"]
    config = load_config(tiny_yaml, [*overrides, "train.epochs=1", "model.embedding_dim=6"])
    result = train(config, tmp_path / "run", progress=False)
    assert result.status == "finished"
    assert load_trained(tmp_path / "run").step == result.final["best_step"]
