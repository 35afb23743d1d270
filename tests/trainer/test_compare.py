"""`tessera compare`: what differs between runs, and which of them may be compared."""

from __future__ import annotations

import csv
import json
import re

import pytest
import torch

from tessera.cli import main
from tessera.training.comparison.runs import read_run
from tessera.training.comparison.table import Comparison
from tessera.training.config import load_config
from tessera.training.trainer.checkpoint_file import read_file
from tessera.training.trainer.logs import read_metrics
from tessera.training.trainer.run import train
from tests.trainer.tiny_runs import TINY, write_criteo


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Four runs: two to be compared, one on other rows, one that was stopped."""
    folder = tmp_path_factory.mktemp("compared")
    clicks = write_criteo(folder / "clicks.tsv", rows=200)
    path = folder / "tiny.yaml"
    path.write_text(TINY.replace("PATH", str(clicks)))
    changes = {
        "plain": [],
        "slow": ["train.dense_optimizer.learning_rate=0.001", "run.name=other"],
        "rows": ["data.split_seed=7"],
        "stopped": ["model.embedding_dim=6"],
    }
    left = iter(range(12))
    for name, overrides in changes.items():
        config = load_config(path, overrides)
        stop = (lambda: next(left, None) is None) if name == "stopped" else (lambda: False)
        train(config, folder / name, progress=False, should_stop=stop)
    return folder


@pytest.fixture
def here(runs, monkeypatch):
    monkeypatch.chdir(runs)


def cells(text):
    """By the first cell of a line, the others."""
    lines = [re.split(r"  +", line.strip()) for line in text.split("\n\n")[0].splitlines()]
    return {line[0]: line[1:] for line in lines}


def test_only_what_differs_is_shown_beside_the_metrics(here, runs, capsys):
    assert main(["compare", "plain", "slow"]) == 0
    out = capsys.readouterr().out
    shown = cells(out)
    final = json.loads((runs / "plain" / "final.json").read_text())
    other = json.loads((runs / "slow" / "final.json").read_text())
    assert shown["run"] == ["plain", "slow"]
    assert shown["train.dense_optimizer.learning_rate"] == ["0.01", "0.001"]
    for split in ("valid", "test"):
        aucs = [f"{own[split]['auc']:.5g}" for own in (final, other)]
        assert shown[f"{split}.auc"] == aucs
    assert shown["best step"] == [str(final["best_step"]), str(other["best_step"])]
    assert shown["status"] == ["finished", "finished"]
    assert [name for name in shown if name.startswith(("data.", "model.", "run."))] == []
    assert "not comparable" not in out
    assert "paired standard errors say: tessera evaluate plain slow" in out


def test_the_parameters_are_those_of_the_checkpoint(runs):
    found = read_run(runs / "plain")
    final = json.loads((runs / "plain" / "final.json").read_text())
    state = read_file(runs / "plain" / final["best_checkpoint"]).model
    assert found.parameters == sum(
        value.numel() for value in state.values() if value.dtype == torch.float32
    )
    tables = 26 * 50 * 4
    assert found.parameters > tables


def test_the_time_is_that_of_the_steps(runs):
    found = read_run(runs / "plain")
    rows = [row for row in read_metrics(runs / "plain" / "metrics.csv") if row["split"] == "train"]
    before, seconds = 0, 0.0
    for row in rows:
        seconds += (int(row["samples"]) - before) / float(row["samples_per_second"])
        before = int(row["samples"])
    assert found.seconds == pytest.approx(seconds)
    assert found.samples_per_second == pytest.approx(before / seconds)


def test_runs_on_other_rows_are_said_not_to_be_comparable(here, capsys):
    assert main(["compare", "plain", "rows", "stopped"]) == 0
    out = capsys.readouterr().out
    assert "not comparable: rows was evaluated on other rows or labels than plain" in out
    assert "stopped is unfinished: its metrics are those of its latest evaluation" in out
    assert "paired standard errors" not in out
    shown = cells(out)
    assert shown["data.split_seed"] == ["0", "7", "0"]
    assert shown["status"] == ["finished", "finished", "unfinished"]


def test_an_older_run_says_that_it_is_not_known(here, runs, tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    for name in ("config.yaml", "metrics.csv"):
        (old / name).write_bytes((runs / "plain" / name).read_bytes())
    final = json.loads((runs / "plain" / "final.json").read_text())
    del final["data"], final["parameters"]
    (old / "final.json").write_text(json.dumps(final))
    comparison = Comparison([read_run(runs / "plain"), read_run(old)])
    assert any("does not say which rows it was evaluated on" in note for note in comparison.notes())


def test_the_files(here, runs, tmp_path, capsys):
    table, page = tmp_path / "runs.csv", tmp_path / "runs.html"
    names = ["plain", "slow", "rows", "stopped", "plain"]
    assert main(["compare", *names, "--csv", str(table), "--html", str(page)]) == 0
    # More than four runs: one line each, a small curve at its end.
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:6]] == ["run", *names]
    assert lines[0].endswith("valid.auc by evaluation")
    assert re.search(r"[▁▂▃▄▅▆▇█]{4}$", lines[1])
    with table.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["run"] for row in rows] == names
    assert float(rows[0]["valid.auc"]) == read_run(runs / "plain").metrics["valid.auc"]
    assert rows[0]["data"] != rows[2]["data"]
    html = page.read_text()
    assert html.count("<svg ") == 3
    assert "not comparable: rows" in html


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plain"], "plain: name two runs or more"),
        (["plain", "nowhere"], "nowhere: there is no run in it (config.yaml is missing)"),
    ],
)
def test_what_the_user_can_mend_is_one_line(here, capsys, words, message):
    assert main(["compare", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
