"""`tessera tune`: which trials there are, what is kept of them, and how a search goes on."""

from __future__ import annotations

import contextlib
import csv
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from tessera.cli import main
from tessera.training.commands import tune as command
from tessera.training.config import load_config
from tessera.training.trainer.files import latest_checkpoint
from tessera.training.trainer.run import train
from tessera.training.tuning import child, result, tuner
from tessera.training.tuning.child import wait_until_free
from tessera.training.tuning.settings import Search, SearchFolder
from tessera.training.tuning.study import Study, require_optuna
from tests import forked_program
from tests.patience import PATIENCE_S
from tests.trainer.tiny_runs import TINY, write_criteo
from tests.tuning import in_process

pytest.importorskip("optuna")

RATE = "train.dense_optimizer.learning_rate=log_uniform(1e-4, 0.1)"
LAYERS = "model.over_layers=[[8], [12, 6]]"


@pytest.fixture(scope="module")
def tiny_yaml(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    clicks = write_criteo(folder / "clicks.tsv", rows=200)
    path = folder / "tiny.yaml"
    path.write_text(TINY.replace("PATH", str(clicks)))
    return path


@pytest.fixture
def children(monkeypatch):
    return in_process.use(monkeypatch)


@pytest.fixture
def no_report(monkeypatch):
    """For searches whose report nobody looks at: drawing one takes a second."""
    monkeypatch.setattr(result, "render_report", lambda *_, **__: "")


def tune(out, *words):
    return main(["tune", "--out", str(out), "--quiet", *map(str, words)])


def begin(tiny_yaml, out, *words):
    over = ["--over", RATE, "--over", LAYERS]
    return tune(out, "--config", tiny_yaml, *over, *words)


def table(out):
    """The trials without their seconds."""
    with (out / "trials.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    for row in rows:
        del row["seconds"]
    return rows


@pytest.fixture(scope="module")
def searched(tiny_yaml, tmp_path_factory):
    """A whole search of 5 trials, one of which cannot be."""
    out = tmp_path_factory.mktemp("searched") / "search"
    with pytest.MonkeyPatch.context() as patch:
        in_process.use(patch)
        assert begin(tiny_yaml, out, "--trials", 5) == 0
    return out


def test_the_best_trial_s_config_trains_to_its_value(searched, tmp_path):
    rows = table(searched)
    assert [row["trial"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert {row["state"] for row in rows} == {"complete"}
    # The config as it is comes first.
    assert rows[0]["train.dense_optimizer.learning_rate"] == "0.01"
    assert rows[0]["model.over_layers"] == "[8]"
    best = max(rows, key=lambda row: float(row["valid.auc"]))
    config = load_config(searched / "best.yaml", ["run.report=false"])
    assert str(list(config.model.over_layers)) == best["model.over_layers"]
    assert config.run.name is None  # the run section is the given one
    again = train(config, tmp_path / "again", progress=False)
    assert again.final["valid"]["auc"] == float(best["valid.auc"])
    assert (
        (searched / "best.yaml")
        .read_text()
        .startswith(f"# The best of search: trial {best['trial']},")
    )


def test_only_the_best_trial_keeps_its_checkpoints(searched):
    best = max(table(searched), key=lambda row: float(row["valid.auc"]))
    kept = [path.parent.name for path in (searched / "trials").glob("*/checkpoints")]
    assert kept == [f"{int(best['trial']):04d}"]


def test_the_report_and_the_table(searched, capsys):
    report = (searched / "report.html").read_text()
    assert report.count("<svg ") == 5  # history, all keys, importance, and one for each key
    assert "5 complete trials, 0 pruned, 0 failed" in " ".join(report.split())
    assert "test" not in (searched / "trials.csv").read_text()
    assert tune(searched, "--resume", "--trials", 5) == 0  # nothing to do
    out = capsys.readouterr().out
    assert out.splitlines()[0].split()[:3] == ["trial", "state", "valid.auc"]
    assert "5 complete" in out
    assert "best.yaml" in out


@pytest.mark.usefixtures("no_report")
def test_the_same_seed_gives_the_same_trials_also_if_it_was_stopped(
    searched, tiny_yaml, tmp_path, children, monkeypatch
):
    out, stop = tmp_path / "search", threading.Event()
    monkeypatch.setattr(command, "stop_on_signals", lambda message: contextlib.nullcontext(stop))
    assert begin(tiny_yaml, out, "--trials", 2, "--keep", "all") == 0
    children.stop_after, children.on_wait = 3, staticmethod(stop.set)
    assert tune(out, "--resume", "--trials", 5) == 130
    assert table(out)[2]["state"] == "running"
    stop.clear()
    children.stop_after = None
    assert tune(out, "--resume", "--trials", 5, "--keep", "all") == 0
    assert children.started == ["0000", "0001", "0002", "0002", "0003", "0004"]
    assert table(out) == table(searched)
    assert len(list((out / "trials").glob("*/checkpoints"))) == 5


def test_trials_that_fail_or_diverge_are_written_down(tiny_yaml, tmp_path, children):
    out = tmp_path / "search"
    over = ["--over", "train.dense_optimizer.learning_rate=[0.01, 1e30]"]
    assert tune(out, "--config", tiny_yaml, *over, "--trials", 4, "--seed", 1) == 0
    rows = table(out)
    failed = [row for row in rows if row["state"] == "failed"]
    assert 0 < len(failed) < 4
    for row in failed:
        assert row["train.dense_optimizer.learning_rate"] == "1e30"
        assert row["reason"].startswith("the loss of step")
        assert row["valid.auc"] == ""
    assert "failed" in (out / "report.html").read_text()


def test_a_search_without_a_complete_trial_says_where_to_look(
    tiny_yaml, tmp_path, children, capsys
):
    out = tmp_path / "search"
    over = ["--over", "train.dense_optimizer.learning_rate=[1e29, 1e30]"]
    assert tune(out, "--config", tiny_yaml, *over, "--trials", 2) == 2
    error = capsys.readouterr().err
    assert "no trial is complete; the last one: the loss of step" in error
    assert "0001.log)" in error
    assert "2 failed" in " ".join((out / "report.html").read_text().split())


@pytest.mark.usefixtures("no_report")
def test_what_no_values_can_mend_ends_the_search(tiny_yaml, tmp_path, children, capsys):
    out = tmp_path / "search"
    assert begin(tiny_yaml, out, "data.path=nowhere.tsv", "--trials", 9) == 2
    assert "the first 3 trials failed alike: path=" in capsys.readouterr().err
    assert len(table(out)) == 3


@pytest.mark.usefixtures("no_report")
def test_a_trial_that_never_ends_is_given_up(tiny_yaml, tmp_path, children):
    out = tmp_path / "search"
    assert begin(tiny_yaml, out, "--trials", 1) == 0
    require_optuna()
    folder = SearchFolder(out)
    study = Study(folder.database, Search.from_json(folder.search))
    number = study.begin().number
    for _ in range(3):  # three searches that died with it
        study.count_start(number)
    assert tune(out, "--resume", "--trials", 2) == 0
    assert table(out)[1]["reason"] == "it was started 3 times and never ended"


def test_bad_trials_are_pruned(tiny_yaml, tmp_path, children):
    out = tmp_path / "search"
    over = ["--over", "train.embedding_optimizer.learning_rate=log_uniform(1e-6, 1)"]
    words = ("--prune", "halving", "--trials", 8, "--metric", "loss")
    children.stop_after = 13  # each is looked at after its evaluations at steps 9 and 10
    assert tune(out, "--config", tiny_yaml, *over, *words) == 0
    rows = table(out)
    pruned = [row for row in rows if row["state"] == "pruned"]
    complete = [row for row in rows if row["state"] == "complete"]
    assert len(pruned) + len(complete) == 8
    assert len(pruned) > 1
    assert {row["reason"] for row in pruned} == {"halving pruning"}
    # The value of a pruned trial is that of its last evaluation.
    best = min(float(row["valid.loss"]) for row in complete)
    assert best <= min(float(row["valid.loss"]) for row in pruned)
    for row in pruned:
        assert not (out / "trials" / f"{int(row['trial']):04d}" / "final.json").exists()


@pytest.mark.usefixtures("no_report")
def test_a_killed_search_goes_on_where_its_trials_are(tiny_yaml, tmp_path, monkeypatch):
    """Two real processes below a real search, all of which is killed but them."""
    out = tmp_path / "search"
    endless = tmp_path / "endless.yaml"
    endless.write_text(tiny_yaml.read_text().replace("epochs: 2", "epochs: 100000"))
    words = ["tune", "--config", endless, "--out", out]
    words += ["--over", RATE, "--trials", "2", "--processes", "2", "--quiet"]
    with forked_program.start(words) as search:
        wait_for(lambda: len(list((out / "trials").glob("000[01]/metrics.csv"))) == 2, search)
        search.kill()
    # The trials see that and write a checkpoint each; nobody holds their folders then.
    for number in range(2):
        assert wait_until_free(out / "trials" / f"{number:04d}", within_s=PATIENCE_S)
        assert latest_checkpoint(out / "trials" / f"{number:04d}" / "checkpoints") is not None
        assert "stopped after step" in (out / "trials" / f"{number:04d}.log").read_text()
    states = [r.state for r in records(out)]
    assert states == ["running", "running"]
    # The same trials go on, now to a nearer end, which a resumed run may not have: both fail, in one
    # line each, which shows that they were taken up and not begun anew.
    base = out / "base.yaml"
    base.write_text(base.read_text().replace("epochs: 100000", "epochs: 3"))
    started = SimpleNamespace(Popen=forked, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(child, "subprocess", started)
    assert tune(out, "--resume", "--trials", 2) == 2
    assert [row["state"] for row in table(out)] == ["failed", "failed"]
    assert all("the config differs from that of the run" in r["reason"] for r in table(out))


def forked(command, *, stdout, stderr, **_):
    """A trial as `Child` starts it, but forked; it ends at once, so that it needs no session of its own."""
    return forked_program.start(command[3:], stdout=stdout, stderr=stderr)


def records(out):
    folder = SearchFolder(out)
    require_optuna()
    return Study(folder.database, Search.from_json(folder.search)).records()


def wait_for(condition, process):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, "the search ended"
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trials", 0], "--trials 0: give at least 1"),
        (["--processes", 0], "--processes 0: give at least 1"),
        (["--over", "model.droput=[0, 0.1]"], "did you mean model.dropout?"),
        (["--metric", "test.auc"], "settings are never chosen by the test rows"),
        (["model.over_layers=[9]"], "model.over_layers is searched and set to one value"),
        (["train.epochs=0"], "epochs=0: give at least 1"),
        (["--space", "no-such.yaml"], "no-such.yaml: No such file"),
        (["--resume"], "there is no search in"),
    ],
)
def test_what_the_user_can_mend_is_one_line(tiny_yaml, tmp_path, capsys, words, message):
    assert begin(tiny_yaml, tmp_path / "search", *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "search" / "search.json").exists()


def test_a_folder_with_a_search_is_gone_on_with_or_left_alone(
    searched, tiny_yaml, tmp_path, capsys
):
    assert begin(tiny_yaml, searched) == 2
    assert "holds a search; add --resume" in capsys.readouterr().err
    assert tune(searched, "--resume", "--seed", 4, "train.epochs=2") == 2
    assert "--resume takes KEY=VALUE, --seed from" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert begin(tiny_yaml, tmp_path) == 2
    assert "is not empty and holds no search" in capsys.readouterr().err


def test_without_optuna_the_extra_is_named(tiny_yaml, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert begin(tiny_yaml, tmp_path / "search") == 2
    assert "pip install 'tessera-rec[tune]'" in capsys.readouterr().err


def test_threads_and_gpus_are_dealt_out(tiny_yaml, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    free = load_config(tiny_yaml, ["train.threads=null"])
    assert [tuner._share_of_threads(free, n) for n in (1, 3, 20)] == [8, 2, 1]
    assert tuner._share_of_threads(load_config(tiny_yaml), 3) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert tuner._gpus(load_config(tiny_yaml, ["train.device=cuda"])) == ["2", "5"]
    assert tuner._gpus(free) == []
