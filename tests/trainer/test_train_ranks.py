"""Runs of several ranks: against one rank, against themselves after a stop, and under torchrun."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tessera.cli import main
from tessera.errors import UserError
from tessera.training.config import load_config
from tessera.training.distributed.checkpoint import read_checkpoint
from tessera.training.trained import load_trained
from tessera.training.trainer.files import latest_checkpoint, list_checkpoints
from tessera.training.trainer.logs import read_metrics
from tessera.training.trainer.run import train
from tessera.training.trainer.run_folder import RunFolder
from tests import with_parent
from tests.patience import PATIENCE_S
from tests.trainer.tiny_runs import changed
from tests.training.ranks import run_on_ranks


def train_here(config, out, resume, stop_after):
    """On a rank: what `train` gives; rank 0 asks to stop after so many questions, or never."""
    calls = itertools.count(1)
    asks = stop_after is not None and torch.distributed.get_rank() == 0
    result = train(
        config,
        out,
        resume=resume,
        progress=False,
        should_stop=lambda: asks and next(calls) >= stop_after,
    )
    return result.status, result.step, result.final


def on_ranks(world_size, config, out, *, resume=False, stop_after=None):
    results = run_on_ranks(world_size, train_here, config, out, resume, stop_after)
    assert all(result[:2] == results[0][:2] for result in results)
    return results[0]


def outcome(out):
    """All that a run of several ranks computed, equal only if every bit is."""
    rows = read_metrics(RunFolder(out).metrics)
    for row in rows:
        row.pop("samples_per_second")
    tensors = {}
    for step, path in list_checkpoints(RunFolder(out).checkpoints).items():
        saved = read_checkpoint(path)
        tensors[step] = {
            **{f"model.{name}": value for name, value in saved.model.items()},
            **saved.extra_tensors,
            **{
                f"{name}.{key}": value
                for name, states in saved.optimizer["state"].items()
                for key, value in states.items()
            },
        }
    return rows, tensors


def assert_same_bits(found, expected):
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for step, tensors in found[1].items():
        assert tensors.keys() == expected[1][step].keys()
        for name, value in tensors.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected[1][step][name]))


@pytest.fixture(scope="module")
def small(tiny_yaml):
    """One epoch, whose last batches are smaller than the rest."""
    config = load_config(tiny_yaml, ["train.epochs=1", "train.batch_size=17"])
    return changed(config, checkpoint_every_steps=6)


@pytest.fixture(scope="module")
def straight(small, tmp_path_factory):
    """The uninterrupted run of two ranks."""
    out = tmp_path_factory.mktemp("straight") / "run"
    status, step, final = on_ranks(2, small, out)
    assert (status, step) == ("finished", 19)
    assert final == RunFolder(out).read_final()
    assert {path.suffix for path in list_checkpoints(RunFolder(out).checkpoints).values()} == {
        ".shards"
    }
    return out


@pytest.mark.parametrize(
    ("stop_after", "pipeline"),
    [(4, "plain"), (11, "plain"), (5, "sparse_dist"), (11, "sparse_dist"), (4, "prefetch")],
)
def test_a_stop_changes_no_bit(small, straight, tmp_path, stop_after, pipeline):
    out = tmp_path / "run"
    small = changed(small, pipeline=pipeline)
    status, step, _ = on_ranks(2, small, out, stop_after=stop_after)
    assert status == "interrupted"
    assert 0 < step < 19
    assert on_ranks(2, small, out, resume=True)[0] == "finished"
    assert_same_bits(outcome(out), outcome(straight))
    # A finished run is left alone.
    assert on_ranks(2, small, out, resume=True)[2] == RunFolder(straight).read_final() | {
        "evaluation_samples_per_second": RunFolder(out).read_final()[
            "evaluation_samples_per_second"
        ]
    }


@pytest.mark.parametrize("sharding", ["auto", "row_wise"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_go_on_where_one_rank_was_as_it_would_have(tiny_yaml, tmp_path, world_size, sharding):
    config = load_config(tiny_yaml, ["train.epochs=1", "train.batch_size=17", "model.dropout=0"])
    alone, together = tmp_path / "alone", tmp_path / "together"
    calls = itertools.count(1)
    train(config, alone, progress=False, should_stop=lambda: next(calls) >= 5)
    shutil.copytree(alone, together)
    final = train(config, alone, resume=True, progress=False).final
    spread = changed(config, sharding=sharding)
    assert on_ranks(world_size, spread, together, resume=True)[0] == "finished"
    # The same sums in another order: float32's rounding, over 15 steps of a small net.
    for ours, theirs in zip(
        read_metrics(RunFolder(together).metrics),
        read_metrics(RunFolder(alone).metrics),
        strict=True,
    ):
        assert ours["step"] == theirs["step"]
        assert float(ours["loss"]) == pytest.approx(float(theirs["loss"]), rel=1e-4)
    ours = load_trained(together)
    theirs = load_trained(alone)
    assert ours.checkpoint_path.suffix == ".shards"
    assert ours.metrics["valid"]["log_loss"] == pytest.approx(final["valid"]["log_loss"], rel=1e-4)
    for name, value in ours.model.state_dict().items():
        torch.testing.assert_close(value, theirs.model.state_dict()[name], rtol=0, atol=1e-3)


def test_ranks_without_a_sample_take_part(tiny_yaml, tmp_path):
    config = load_config(tiny_yaml, ["train.batch_size=3", "model.dropout=0"])
    alone, together = tmp_path / "alone", tmp_path / "together"
    calls = itertools.count(1)
    train(config, alone, progress=False, should_stop=lambda: next(calls) >= 2)
    shutil.copytree(alone, together)
    calls = itertools.count(1)
    train(config, alone, resume=True, progress=False, should_stop=lambda: next(calls) >= 4)
    status, step, _ = on_ranks(4, config, together, resume=True, stop_after=4)
    assert (status, step) == ("interrupted", 6)
    ours, theirs = (load_trained(out).model.state_dict() for out in (together, alone))
    for name, value in ours.items():
        # float32 sums in another order, over four steps of a small net.
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("pipeline", ["plain", "sparse_dist", "prefetch"])
def test_a_gpu_goes_on_where_a_cpu_was_as_it_would_have(tiny_yaml, tmp_path, pipeline):
    config = load_config(tiny_yaml, ["train.epochs=1", "train.batch_size=17", "model.dropout=0"])
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    calls = itertools.count(1)
    train(config, alone, progress=False, should_stop=lambda: next(calls) >= 5)
    shutil.copytree(alone, moved)
    train(config, alone, resume=True, progress=False)
    on_gpu = changed(config, device="cuda", pipeline=pipeline)
    train(on_gpu, moved, resume=True, progress=False)
    for ours, theirs in zip(
        read_metrics(RunFolder(moved).metrics), read_metrics(RunFolder(alone).metrics), strict=True
    ):
        # float32 sums in another order, of a small net, over 15 steps.
        assert float(ours["loss"]) == pytest.approx(float(theirs["loss"]), rel=1e-3)
    ours, theirs = load_trained(moved).model.state_dict(), load_trained(alone).model.state_dict()
    assert all(value.device.type == "cpu" for value in ours.values())
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=5e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused(tiny_yaml, tmp_path):
    config = load_config(tiny_yaml, ["train.device=cuda"])
    with pytest.raises(UserError, match=r"train\.device=cuda: torch sees 0 GPUs"):
        train(config, tmp_path / "run", progress=False)


def test_one_rank_goes_on_where_several_were(small, straight, tmp_path):
    out = tmp_path / "run"
    on_ranks(2, small, out, stop_after=7)
    step = int(latest_checkpoint(RunFolder(out).checkpoints).stem[5:])
    result = train(small, out, resume=True, progress=False)
    assert (result.status, result.step) == ("finished", 19)
    assert step < 19
    assert load_trained(result.best_checkpoint).step == RunFolder(out).read_final()["best_step"]


def test_a_checkpoint_of_several_ranks_is_a_model(straight):
    trained = load_trained(straight)
    final = RunFolder(straight).read_final()
    assert trained.step == final["best_step"]
    assert trained.metrics["valid"] == final["valid"]
    assert trained.checkpoint_path == straight / final["best_checkpoint"]
    assert load_trained(trained.checkpoint_path).step == trained.step


def refused_here(config, out, resume):
    with pytest.raises(UserError) as raised:
        train(config, out, resume=resume, progress=False)
    return str(raised.value)


def test_every_rank_hears_of_a_refusal(small, straight, tmp_path):
    for message in run_on_ranks(2, refused_here, small, straight, False):
        assert "holds a finished run" in message
    for message in run_on_ranks(2, refused_here, small, tmp_path / "none", True):
        assert "there is no run in" in message
    other = changed(small, batch_size=5)
    for message in run_on_ranks(2, refused_here, other, straight, True):
        assert "differs from that of the run" in message


def test_several_ranks_are_told_one_folder(tiny_yaml, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "--config", str(tiny_yaml)]) == 2
    assert "--out is missing; several ranks" in capsys.readouterr().err


def pids_below(pid):
    """Every process that ``pid`` has started, and theirs."""
    found = []
    with contextlib.suppress(FileNotFoundError):  # the process has ended
        for task in list(Path(f"/proc/{pid}/task").iterdir()):
            with contextlib.suppress(FileNotFoundError):  # the thread has ended
                for child in (task / "children").read_text().split():
                    found += [int(child), *pids_below(int(child))]
    return found


def rank_of(pid):
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((int(pair[5:]) for pair in pairs if pair.startswith(b"RANK=")), None)


def under_torchrun(config, out):
    """``tessera train`` on two ranks, which a rank that is killed does not end."""
    return with_parent.start(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "--max-restarts", "1", "-m", "tessera", "train"),
            *("--config", str(config), "--out", str(out)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint_and_no_bit(
    small, straight, tmp_path
):
    config = tmp_path / "small.yaml"
    config.write_text(small.to_yaml())
    out = tmp_path / "run"
    process = under_torchrun(config, out)
    said = []
    try:
        for line in process.stdout:
            said.append(line)
            if line.startswith("step 9:"):  # its evaluation; the checkpoint comes right after it
                victims = [pid for pid in pids_below(process.pid) if rank_of(pid) == 1]
                os.kill(victims[0], signal.SIGKILL)
                break
        said += process.stdout.readlines()
        assert process.wait(timeout=PATIENCE_S) == 0, "".join(said)
    finally:
        if process.poll() is None:
            process.kill()
    assert any("resumed after step" in line for line in said) or "step 6" not in "".join(said)
    assert [line for line in said if line.startswith("finished: best step")], "".join(said)
    assert_same_bits(outcome(out), outcome(straight))


def test_ranks_whose_torchrun_is_killed_save_and_end(small, straight, tmp_path):
    config = tmp_path / "endless.yaml"
    config.write_text(changed(small, epochs=10_000, eval_every_steps=19).to_yaml())
    out = tmp_path / "run"
    process = under_torchrun(config, out)
    said, ranks = [], []
    late = threading.Timer(PATIENCE_S, lambda: [os.kill(pid, signal.SIGKILL) for pid in ranks])
    for line in process.stdout:
        said.append(line)
        if line.startswith("step 19:"):
            ranks += pids_below(process.pid)
            process.kill()
            late.start()
            break
    # The ranks have the other end: it is closed when the last of them has ended.
    said += process.stdout.readlines()
    late.cancel()
    process.wait()
    assert any("torchrun is gone" in line for line in said), "".join(said)
    assert any(line.startswith("stopped after step") for line in said), "".join(said)
    step = int(latest_checkpoint(RunFolder(out).checkpoints).stem[5:])
    assert step >= 19
    # Nobody holds the folder, and the checkpoint is whole.
    on_ranks(2, load_config(RunFolder(out).config), out, resume=True, stop_after=1)
