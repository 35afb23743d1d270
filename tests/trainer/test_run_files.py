from __future__ import annotations

import io
import math
import re
from datetime import datetime, timezone

import numpy as np
import pytest
import torch

from tessera.durable import replacing
from tessera.errors import UserError
from tessera.training.data.columns import LabelColumn
from tessera.training.trackers.tracker import TrackedRun, parse_trackers
from tessera.training.trainer.display import Display
from tessera.training.trainer.logs import MetricsLog, read_metrics
from tessera.training.trainer.metrics import Evaluation
from tessera.training.trainer.report import render_report
from tessera.training.trainer.run_facts import RunFacts
from tessera.training.trainer.run_folder import RunFolder
from tessera.training.trainer.split_metrics import SplitEvaluation, SplitMetrics

FINAL = {
    "step": 300,
    "samples": 3000,
    "malformed_rows": 0,
    "best_step": 200,
    "best_checkpoint": "checkpoints/step-0000000200.pt",
    "metric": "auc",
    "valid": {
        "rows": 1000,
        "positives": 300,
        "auc": 0.75,
        "log_loss": 0.5,
        "normalised_entropy": 0.9,
        "calibration": 1.01,
    },
    "test": None,
}


def evaluation(value=0.7):
    found = Evaluation(
        rows=5,
        positives=2,
        auc=value,
        log_loss=value / 3,
        normalised_entropy=0.9,
        calibration=math.nan,
    )
    return SplitEvaluation(by_label={"label": found}, loss=found.loss)


def write_log(path, steps, *, from_step=0, tensorboard=False):
    log = MetricsLog(path, from_step=from_step)
    if tensorboard:
        run = TrackedRun(folder=path.parent, name="x", config={}, from_step=from_step, state=None)
        log.track(parse_trackers("trackers", ["tensorboard"]), run, path.parent / "trackers")
    for step in steps:
        done = {"step": step, "epoch": 1, "samples": 4 * step}
        log.write(
            **done,
            split="train",
            loss=1 / (3 * step),
            dense_learning_rate=1e-3,
            embedding_learning_rate=0.02,
            samples_per_second=123.5,
        )
        if step % 2 == 0:
            found = evaluation()
            numbers = {"auc": found.auc, "calibration": found.only.calibration}
            log.write(**done, split="valid", loss=found.loss, **numbers)
    log.sync()
    log.close()


def test_the_log_keeps_every_bit_of_a_loss(tmp_path):
    write_log(tmp_path / "m.csv", [1, 2, 3])
    rows = read_metrics(tmp_path / "m.csv")
    assert [(row["step"], row["split"]) for row in rows] == [
        ("1", "train"),
        ("2", "train"),
        ("2", "valid"),
        ("3", "train"),
    ]
    assert [float(row["loss"]) for row in rows] == [1 / 3, 1 / 6, 0.7 / 3, 1 / 9]
    assert rows[0]["auc"] == ""
    assert math.isnan(float(rows[2]["calibration"]))


def test_a_resumed_log_is_cut_back_to_its_step(tmp_path):
    write_log(tmp_path / "straight.csv", [1, 2, 3, 4])
    write_log(tmp_path / "broken.csv", [1, 2, 3])
    with (tmp_path / "broken.csv").open("a") as stream:
        stream.write("4,1,16,tr")  # what a kill in the middle of a write leaves
    write_log(tmp_path / "broken.csv", [3, 4], from_step=2)
    assert (tmp_path / "broken.csv").read_bytes() == (tmp_path / "straight.csv").read_bytes()


def test_tensorboard_gets_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_log(tmp_path / "m.csv", [1, 2], tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = events.Scalars("train/loss")
    assert [event.step for event in losses] == [1, 2]
    assert [event.value for event in losses] == pytest.approx([1 / 3, 1 / 6])
    assert events.Scalars("valid/auc")[0].value == pytest.approx(0.7)


def test_the_old_file_stays_when_its_replacement_cannot_be_written(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail():
        with replacing(path) as stream:
            stream.write(b"new")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def states(tmp_path):
    """A folder in each of its states."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    for name in ("stopped", "finished"):
        folder = RunFolder(tmp_path / name)
        folder.checkpoints.mkdir(parents=True)
        folder.write_text(folder.config, "data: {}")
        (folder.checkpoints / "step-0000000010.pt").write_bytes(b"")
    RunFolder(tmp_path / "finished").write_final(FINAL)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "resume", "message"),
    [
        ("absent", False, None),
        ("empty", False, None),
        ("other", False, "is not empty and holds no run; give another --out"),
        ("stopped", False, "stopped after step-0000000010.pt; add --resume"),
        ("finished", False, r"finished run \(best step 200, valid AUC 0.75000\); give another"),
        ("absent", True, "there is no run in"),
        ("other", True, "there is no run in"),
        ("stopped", True, None),
        ("finished", True, None),
    ],
)
def test_what_may_happen_in_a_folder(tmp_path, name, resume, message):
    folder = RunFolder(states(tmp_path) / name)
    if message is None:
        folder.require_fit(resume=resume)
    else:
        with pytest.raises(UserError, match=message):
            folder.require_fit(resume=resume)


def test_only_one_process_trains_into_a_folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with folder.locked():
        with pytest.raises(UserError, match="another process"), folder.locked():
            pass
        folder.require_fit(resume=False)  # its own lock does not count as a foreign file
    with folder.locked():
        pass


def test_a_damaged_final_file_says_what_to_do(tmp_path):
    folder = RunFolder(tmp_path)
    folder.final.write_text('{"best')
    with pytest.raises(UserError, match=r"final\.json is damaged .* delete it and resume"):
        folder.read_final()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def show(stream, *, enabled=True, seconds=4.0, steps=6):
    now = [0.0]
    display = Display(
        total_steps=steps, first_step=0, enabled=enabled, stream=stream, clock=lambda: now[0]
    )
    for step in range(1, steps + 1):
        now[0] += seconds
        display.step(step=step, samples=100, loss=0.5)
    display.evaluation(step=steps, evaluation=evaluation(), better=True)
    display.close()
    return stream.getvalue()


def test_plain_lines_come_every_ten_seconds_with_rate_and_time_left():
    lines = show(io.StringIO()).splitlines()
    assert lines[0] == "step 3/6  25 samples/s  loss 0.50000  12 s left"
    assert lines[1] == "step 6/6  25 samples/s  loss 0.50000  0 s left"
    assert lines[2].startswith("step 6: AUC 0.70000")
    assert lines[2].endswith("(best so far)")
    assert len(lines) == 3


def test_a_terminal_gets_a_bar_with_rate_and_loss():
    text = show(Terminal())
    assert "6/6" in text
    assert "25 samples/s, loss 0.50000" in text


def test_nothing_is_said_when_it_is_turned_off():
    assert show(io.StringIO(), enabled=False) == ""
    assert show(Terminal(), enabled=False) == ""


def report(tmp_path, **final):
    write_log(tmp_path / "m.csv", [100, 200, 300])
    random = np.random.default_rng(0)
    metrics = SplitMetrics([LabelColumn(name="label")], [1.0], 1000)
    metrics.update(
        torch.tensor(random.normal(size=(1000, 1)), dtype=torch.float32),
        torch.tensor(random.integers(0, 2, (1000, 1)), dtype=torch.float32),
    )
    facts = RunFacts(
        name="run",
        source="criteo: clicks.tsv",
        rows={"train": 3000},
        started=datetime(2026, 1, 2, tzinfo=timezone.utc),
        hardware="a processor",
        changed=(),
    )
    return render_report(
        facts=facts,
        folder=tmp_path / "run",
        config_yaml="data:\n  path: <script>alert(1)</script>\n",
        rows=read_metrics(tmp_path / "m.csv"),
        final={**FINAL, **final},
        metrics={"valid": metrics},
    )


def test_the_report_needs_nothing_but_itself(tmp_path):
    html = report(tmp_path)
    links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]*)""", html)
    assert links, "SVG refers to its own clip paths: the pattern should have found them"
    assert all(link.startswith("#") for link in links), links
    assert "<script" not in html
    assert "@import" not in html
    assert "<!DOCTYPE svg" not in html


def test_the_report_shows_plots_table_and_config(tmp_path):
    html = report(tmp_path)
    assert html.count("<svg") == html.count("</svg>") == 4
    for text in ("Loss", "AUC", "Calibration", "Scores by label", "0.75000", "step 200"):
        assert text in html
    assert "&lt;script&gt;" in html, "the config is text, not markup"
    # Ids are unique over all plots, or one plot would be clipped by another's path.
    clips = re.findall(r'<clipPath id="([^"]+)"', html)
    assert len(clips) == len(set(clips)) == 4


def test_the_report_tells_of_malformed_rows(tmp_path):
    assert "malformed" not in report(tmp_path)
    assert "1,234 malformed rows" in report(tmp_path, malformed_rows=1234)


def test_the_report_bears_metrics_that_are_not_defined(tmp_path):
    html = report(tmp_path, test={**FINAL["valid"], "auc": None, "calibration": None})
    assert html.count("not defined") == 4, "in the table, and in front"


@pytest.mark.parametrize("content", [b"garbage\n1,2\n", b"\xff\xfe", b"step\n1\n", b"a\0b\nc\n"])
def test_a_damaged_log_is_refused_with_a_remedy(tmp_path, content):
    path = tmp_path / "metrics.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"metrics\.csv is damaged; delete it and resume"):
        MetricsLog(path, from_step=3)
    assert path.read_bytes() == content
