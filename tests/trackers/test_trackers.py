"""Trackers: what each is told, over a stop and a resume, and what becomes of one that fails."""

from __future__ import annotations

import json
import re
import sys
import threading

import pytest

from tessera.errors import UserError
from tessera.training.config import RunConfig, load_config
from tessera.training.trackers import tracker as trackers
from tessera.training.trackers.attached import AttachedTracker, open_trackers
from tessera.training.trackers.tracker import TrackedRun, parse_trackers
from tessera.training.trainer.logs import read_metrics
from tessera.training.trainer.run import train
from tests.trainer.tiny_runs import TINY, write_criteo

OWN = "tests.trackers.own:"


@pytest.fixture(scope="module")
def tiny_yaml(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracked")
    clicks = write_criteo(folder / "clicks.tsv", rows=200)
    path = folder / "tiny.yaml"
    path.write_text(TINY.replace("PATH", str(clicks)))
    return path


def told(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def stops_after(steps):
    """A ``should_stop`` that is asked once a step."""
    asked = iter(range(10**6))
    return lambda: next(asked) >= steps


def curves(folder):
    """By metric, its points, as metrics.csv has them."""
    found = {}
    for row in read_metrics(folder / "metrics.csv"):
        for name in ("loss", "auc"):
            if row[name]:
                points = found.setdefault(f"{row['split']}/{name}", [])
                points.append((int(row["step"]), float(row[name])))
    return found


def tensorboard_points(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, pytest.approx(event.value, rel=1e-6)) for event in events.Scalars(name)]


def wandb_points(folder, name):
    """The points of all offline folders, in the order of their names, and the ids of their runs."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    points, ids = [], set()
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        store = DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                if name in items:
                    points.append((items["_step"], items[name]))
    return points, ids


def test_a_stopped_and_resumed_run_is_one_run_in_every_tracker(tiny_yaml, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    pytest.importorskip("wandb")
    # The old key, which stands for the tracker of that name.
    config = load_config(
        tiny_yaml,
        [
            f"run.trackers=[{{mlflow: {{uri: '{tmp_path}/ml', experiment: e}}}}, wandb, '{OWN}Lines']",
            "run.tensorboard=true",
            # Each row is a transaction of MLflow's database, which a busy disk takes its time for.
            "train.log_every_steps=9",
        ],
    )
    out = tmp_path / "run"
    stopped = train(config, out, progress=False, should_stop=stops_after(12))
    assert stopped.status == "interrupted"
    monkeypatch.chdir(tmp_path)  # where it is resumed changes nothing
    finished = train(config, out, resume=True, progress=False)
    assert finished.status == "finished"
    wanted = curves(out)
    assert len(wanted["train/loss"]) > 3

    for name in ("train/loss", "valid/auc"):
        assert tensorboard_points(out, name) == wanted[name]
        points, ids = wandb_points(out, name)
        assert points == wanted[name]
        assert len(ids) == 1

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/ml/mlflow.db")
    experiment = client.get_experiment_by_name("e").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.info.status == "FINISHED"
    assert run.data.params["train.epochs"] == "2"
    assert run.data.params["model.over_layers"] == "[8]"
    assert run.data.metrics["best/valid/auc"] == finished.final["valid"]["auc"]
    for name in ("train/loss", "valid/auc"):
        history = client.get_metric_history(run.info.run_id, name)
        assert sorted((point.step, point.value) for point in history) == wanted[name]

    calls = told(out / "lines.txt")
    assert [call for call in calls if call[0] == "open"] == [
        ["open", 0, None, "2"],
        ["open", stopped.step, {"begun": "0"}, "2"],
    ]
    assert stopped.step == 10  # in the evaluation, whose row comes after the resume
    assert [call for call in calls if call[0] == "close"] == [
        ["close", "interrupted"],
        ["close", "finished"],
    ]
    steps = [call[1] for call in calls if call[0] == "log"]
    assert steps == sorted(steps)
    assert steps == [int(row["step"]) for row in read_metrics(out / "metrics.csv")]
    (summary,) = [call for call in calls if call[0] == "summary"]
    assert summary[1] == finished.final["best_step"]
    assert "best/test/log_loss" in summary[2]


def test_one_that_fails_is_left_out_with_one_line(tiny_yaml, tmp_path, capfd):
    config = load_config(tiny_yaml, [f"run.trackers=['{OWN}Breaks', '{OWN}Lines']"])
    # The two write one file each.
    config = load_config(
        tiny_yaml, [f"run.trackers=[{{'{OWN}Breaks': {{name: broken.txt}}}}, '{OWN}Lines']"]
    )
    assert train(config, tmp_path / "run", progress=False).status == "finished"
    (line,) = capfd.readouterr().err.splitlines()
    assert re.fullmatch(
        r"tessera train: tracker tests\.trackers\.own:Breaks failed and is left out from here on:"
        r" RuntimeError: the server at .*own\.py:\d+ in log: .*",
        line,
    )
    assert [call[0] for call in told(tmp_path / "run" / "broken.txt")] == ["open", "log", "log"]
    assert told(tmp_path / "run" / "lines.txt")[-1] == ["close", "finished"]


def test_a_run_that_diverges_has_failed(tiny_yaml, tmp_path):
    config = load_config(
        tiny_yaml, [f"run.trackers=['{OWN}Lines']", "train.dense_optimizer.learning_rate=1e30"]
    )
    with pytest.raises(UserError, match="the loss of step"):
        train(config, tmp_path / "run", progress=False)
    assert told(tmp_path / "run" / "lines.txt")[-1] == ["close", "failed"]


class Recorder:
    """Remembers; waits in ``log`` until ``go`` is set."""

    def __init__(self, *, blocked=False):
        self.go = threading.Event()
        self.steps = []
        if not blocked:
            self.go.set()

    def log(self, step, metrics):
        self.go.wait(60)
        self.steps.append(step)

    def summarize(self, metrics):
        pass

    def close(self, status):
        self.steps.append(status)


def test_a_tracker_that_joins_later_is_given_what_the_run_keeps(tmp_path):
    run = TrackedRun(
        folder=tmp_path, name="x", config={"train.epochs": "2"}, from_step=4, state=None
    )
    configs = parse_trackers("trackers", [f"{OWN}Lines"])
    history = [(2, {"train/loss": 1.0}), (4, {"train/loss": 0.5})]
    for _ in range(2):
        (attached,) = open_trackers(
            configs,
            run,
            states=tmp_path / "states",
            history=history,
            told={(4, "train/loss"), (5, "train/loss")},
        )
        attached.log(4, {"valid/auc": 0.5})  # the evaluation was stopped, the loss was logged
        for step in (5, 6):
            attached.log(step, {"train/loss": 0.1})
        attached.close("finished")
    steps = [call[1] for call in told(tmp_path / "lines.txt") if call[0] == "log"]
    # New to the run it gets the history; once it knows it, only what it was not told.
    assert steps == [2, 4, 4, 5, 6, 4, 6]


def test_one_that_is_too_slow_is_left_out():
    warnings, slow = [], Recorder(blocked=True)
    attached = AttachedTracker("slow", slow, warn=warnings.append, most_waiting=4)
    for step in range(1, 20):
        attached.log(step, {"a": 1.0})
    attached.close("finished", within_s=0)
    assert warnings == ["tracker slow failed and is left out from here on: 4 calls wait for it"]
    slow.go.set()


def test_a_server_that_hangs_does_not_hold_the_end_up():
    warnings, slow = [], Recorder(blocked=True)
    attached = AttachedTracker("slow", slow, warn=warnings.append)
    attached.log(1, {"a": 1.0})
    attached.close("finished", within_s=0.05)
    assert len(warnings) == 1
    assert "has not taken everything within 0.05 s" in warnings[0]
    slow.go.set()


def test_rows_and_the_end_come_in_order():
    recorder = Recorder()
    attached = AttachedTracker("a", recorder, told={(1, "a"), (2, "a")})
    for step in range(1, 50):
        attached.log(step, {"a": 1.0} if step != 7 else {})
    attached.close("interrupted")
    assert recorder.steps == [*range(3, 7), *range(8, 50), "interrupted"]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["mlfow"], "trackers[0] is 'mlfow'; give one of mlflow, tensorboard, wandb, pkg.module:"),
        ([3], "trackers[0]=3: give a tracker's name"),
        ([{"mlflow": 3}], "trackers[0]={'mlflow': 3}: give a tracker's name"),
        ([{"mlflow": {"url": "x"}}], "unknown key url; did you mean uri?"),
        ([{"mlflow": {"uri": 3}}], "trackers[0].mlflow: uri=3: expected text or null"),
        ([{"wandb": None}, "wandb"], "trackers[1]='wandb': it is named twice"),
        (["own.py:"], "trackers[0] is 'own.py:'; give pkg.module:function"),
    ],
)
def test_a_wrong_item_is_refused_by_the_config(items, message):
    with pytest.raises(UserError, match=re.escape(message)):
        RunConfig(trackers=tuple(items))


def test_the_old_key_and_the_new_one_name_tensorboard_once():
    assert list(RunConfig().settled_trackers()) == ["tensorboard"]
    assert list(RunConfig(trackers=("tensorboard",)).settled_trackers()) == ["tensorboard"]
    assert list(RunConfig(tensorboard=False).settled_trackers()) == []
    named = RunConfig(tensorboard=False, trackers=("wandb", "tensorboard"))
    assert list(named.settled_trackers()) == ["wandb", "tensorboard"]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (f"{OWN}Incomplete", "has no state and no log and no summarize and no close"),
        (f"{OWN}Nobody", "has no function Nobody"),
        (f"{OWN}fails", "no such place"),
        ({f"{OWN}Lines": {"colour": 1}}, "colour"),
    ],
)
def test_one_that_cannot_be_opened_is_the_user_s_to_mend(tmp_path, item, message):
    run = TrackedRun(
        folder=tmp_path, name="x", config={"train.epochs": "2"}, from_step=0, state=None
    )
    configs = parse_trackers("trackers", [item])
    with pytest.raises(UserError, match=message) as caught:
        open_trackers(configs, run, states=tmp_path, history=(), told=())
    assert "\n" not in str(caught.value)


def test_an_mlflow_that_cannot_be_reached_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    pytest.importorskip("mlflow")
    run = TrackedRun(folder=tmp_path, name="x", config={}, from_step=0, state=None)
    configs = parse_trackers("trackers", [{"mlflow": {"uri": "http://127.0.0.1:1"}}])
    with pytest.raises(UserError, match="mend that, or leave mlflow out") as caught:
        open_trackers(configs, run, states=tmp_path, history=(), told=())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_missing_package_names_its_extra_before_the_data_is_read(
    tiny_yaml, tmp_path, monkeypatch, name
):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda module: None)
    config = load_config(tiny_yaml, [f"run.trackers=[{name}]", "data.path=/no/such/file"])
    with pytest.raises(
        UserError, match=rf"{name} needs {name}; pip install 'tessera-rec\[{name}\]'"
    ):
        train(config, tmp_path / "run", progress=False)


def test_a_damaged_state_says_what_to_do(tmp_path):
    (tmp_path / "wandb.json").write_text("[1]")
    run = TrackedRun(folder=tmp_path, name="x", config={}, from_step=0, state=None)
    with pytest.raises(UserError, match="delete it, and the tracker begins another run"):
        open_trackers(
            parse_trackers("trackers", ["wandb"]), run, states=tmp_path, history=(), told=()
        )
