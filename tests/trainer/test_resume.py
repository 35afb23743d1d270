"""A run that was stopped, or killed, and taken up again equals the run that was not."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess

import pytest
import torch

from tessera.cli import main
from tessera.training.trainer.checkpoint import load_checkpoint
from tessera.training.trainer.display import Display
from tessera.training.trainer.files import list_checkpoints
from tessera.training.trainer.logs import read_metrics
from tessera.training.trainer.run import train
from tessera.training.trainer.run_folder import RunFolder
from tests import forked_program
from tests.patience import PATIENCE_S
from tests.trainer.tiny_runs import changed


def outcome(out):
    """All that a run computed, as values that are equal only if every bit is."""
    folder = RunFolder(out)
    rows = read_metrics(folder.metrics)
    final = folder.read_final()
    for timed in (*rows, final):
        timed.pop("samples_per_second", None)
        timed.pop("evaluation_samples_per_second", None)
    weights = {}
    for step, path in list_checkpoints(folder.checkpoints).items():
        checkpoint = load_checkpoint(path)
        for kind in ("model", "fused_optimizer", "dense_optimizer", "rng"):
            weights[step, kind] = bits(getattr(checkpoint, kind))
    return {"rows": rows, "final": final, "weights": weights}


def bits(value):
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes())
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value


@pytest.fixture(scope="module")
def straight(tiny_yaml, tmp_path_factory):
    """The uninterrupted run."""
    from tessera.training.config import load_config

    out = tmp_path_factory.mktemp("straight") / "run"
    result = train(load_config(tiny_yaml), out, progress=False)
    assert result.status == "finished"
    found = outcome(out)
    steps = [int(row["step"]) for row in found["rows"] if row["split"] == "train"]
    # 20 batches of 16 of the 320 training rows, twice; 9 and 27 are odd evaluations.
    assert steps == sorted({*range(2, 41, 2), 9, 27})
    assert len({row["loss"] for row in found["rows"]}) == len(found["rows"])
    return found


def stop_after(questions):
    """A ``should_stop`` that is True from its ``questions``-th call on."""
    calls = itertools.count(1)
    return lambda: next(calls) >= questions


# Asked after each step and before each of the three batches of an evaluation (six of the final
# one), so that these stops fall before, within and right after evaluations.
@pytest.mark.parametrize(
    ("questions", "pipeline"),
    [
        ((1, 2, 3, 8), "plain"),
        ((9, 10), "plain"),
        ((7, 1), "sparse_dist"),
        ((5, 12), "sparse_dist"),
        ((8, 10), "prefetch"),
        ((30,), "plain"),
    ],
)
def test_clean_stops_change_no_bit(tiny, straight, tmp_path, questions, pipeline):
    out = tmp_path / "run"
    tiny = changed(tiny, pipeline=pipeline)
    for stops, question in enumerate(itertools.cycle(questions)):
        result = train(
            tiny, out, resume=stops > 0, progress=False, should_stop=stop_after(question)
        )
        if result.status == "finished":
            break
        assert not RunFolder(out).is_finished
        assert stops < 100, "every round of questions is enough for a step or an evaluation"
    assert stops >= 1
    assert outcome(out) == straight


def command(out, *arguments):
    arguments = ["train", "--out", out, *arguments]
    return forked_program.start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(process, text):
    """Read stderr until a line that begins with ``text``."""
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith(text):
            return
    raise AssertionError(f"no line {text!r} in {seen}")


def test_sigkill_and_sigterm_change_no_bit(tiny, tiny_yaml, straight, tmp_path):
    out = tmp_path / "run"
    process = command(out, "--config", tiny_yaml)
    wait_for(process, "step 9:")
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGKILL
    assert not RunFolder(out).is_finished

    process = command(out, "--resume")
    wait_for(process, "step 20:")
    process.terminate()
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, stderr
    step = max(list_checkpoints(RunFolder(out).checkpoints))
    assert f"stopped after step {step}; go on with: tessera train --resume --out {out}" in stderr
    assert "Traceback" not in stderr

    assert train(tiny, out, resume=True, progress=False).status == "finished"
    assert outcome(out) == straight


def test_sigint_ends_with_130_and_the_way_on(tiny_yaml, straight, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    monkeypatch.setattr(Display, "evaluation", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    assert main(["train", "--config", str(tiny_yaml), "--out", str(out)]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    hint = f"stopped after step 9; go on with: tessera train --resume --out {out}\n"
    assert capsys.readouterr().err.endswith(hint)
    monkeypatch.undo()
    assert main(["train", "--resume", "--out", str(out), "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("finished: best step")
    assert captured.err == ""
    assert outcome(out) == straight


def test_resuming_a_finished_run_only_says_so(tiny, tmp_path):
    out = tmp_path / "run"
    first = train(tiny, out, progress=False)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    again = train(tiny, out, resume=True, progress=False)
    assert again == first
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    assert json.loads((out / "final.json").read_text()) == first.final
