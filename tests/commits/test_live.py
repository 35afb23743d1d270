"""`tessera train --publish`: what is published while a model is trained is what its checkpoints hold."""

import os
import shutil
import signal
import sys

import pytest
import torch

from tessera.cli import main
from tessera.serving.commits import file
from tessera.serving.commits.chain import StepKind, next_step
from tessera.serving.commits.fence import read_fence, write_fence
from tessera.serving.commits.file import read_commit
from tessera.serving.commits.replay import replay
from tessera.serving.commits.state import VersionState
from tessera.serving.package.commit import COMMIT_PACKAGE_RECORD
from tessera.serving.packaging.commits import live
from tessera.serving.packaging.commits.live import live_options
from tessera.serving.packaging.commits.publish import Publisher
from tessera.serving.packaging.servable import make_servable
from tessera.training.config import load_config
from tessera.training.trainer import run
from tessera.training.trainer.checkpoint import load_checkpoint
from tessera.training.trainer.files import latest_checkpoint
from tessera.training.trainer.run import train
from tests.patience import PATIENCE_S
from tests.trainer.tiny_runs import TINY, write_criteo
from tests.training.ranks import process_context, run_on_ranks


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A config, and a repository with version 1 of the model ``ads`` of an earlier run of it, per row type."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_criteo(folder / "clicks.tsv", 300)
    config = folder / "tiny.yaml"
    # Each checkpoint is packaged, which takes longest here.
    text = TINY.replace("eval_every_steps: 9", "eval_every_steps: 15")
    text = text.replace("checkpoint_every_steps: 7", "checkpoint_every_steps: 10")
    config.write_text(
        text.replace("PATH", str(data)).replace("embedding_dim: 4", "embedding_dim: 16")
    )
    out = folder / "first"
    assert (
        main(["train", "--config", str(config), "--out", str(out), "--quiet", "train.epochs=1"])
        == 0
    )
    for dtype in ("int8", "int8b"):
        (folder / dtype).mkdir()
        assert main(["package-model", str(out), "--repository", str(folder / dtype), "--name", "ads",
                     "--dtype", dtype, "--no-evaluate"]) == 0  # fmt: skip
    return folder


@pytest.fixture
def repository(trained, tmp_path):
    def make(dtype="int8"):
        return shutil.copytree(trained / dtype, tmp_path / dtype)

    return make


def commits(repository, version=1):
    """Every commit of the log, which has no gap."""
    log = repository / f"ads/{version}/log"
    names, applied, reads = [path.name for path in log.iterdir()], [], []
    while (step := next_step(names, read_fence(log), applied)).kind is StepKind.TAKE:
        reads.append(read_commit(log / f"{step.number:08d}.commit"))
        applied.append(step.number)
    assert step.kind is StepKind.WAIT
    return reads


def check(repository, run, capsys, version=1):
    """The log follows its chain, and its state is that of the package of the last checkpoint."""
    folder = repository / f"ads/{version}"
    state = VersionState(folder / "model.pt", "ads", version)
    assert replay(state, folder / "log") is None
    capsys.readouterr()
    last = latest_checkpoint(run / "checkpoints")
    assert main(["publish", str(last), "--repository", str(repository), "--model", "ads",
                 "--no-evaluate"]) == 0  # fmt: skip
    assert "nothing has changed" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["int8", "int8b"])
def test_commits_are_the_differences_of_checkpoints(
    trained, repository, tmp_path, capsys, monkeypatch, *, dtype
):
    models, traced = repository(dtype), []

    def counted(*arguments, **options):
        traced.append(1)
        return make_servable(*arguments, **options)

    monkeypatch.setattr(live, "make_servable", counted)
    out = tmp_path / "run"
    command = ["train", "--config", str(trained / "tiny.yaml"), "--out", str(out), "--quiet",
               "train.seed=7"]  # fmt: skip
    publish = ["--publish", str(models / "ads"), "--publish-every", "4steps"]
    assert main([*command, *publish]) == 0
    check(models, out, capsys)
    found = commits(models)
    described = [read for read in found if COMMIT_PACKAGE_RECORD in read.contents]
    assert len(described) > 3
    # The first commit finds out where weights lie: once as they are, and once for each digit of their numbers.
    assert len(traced) <= 4 < len(found) - len(described)
    # A package of the checkpoint shows nothing that the tracker has missed.
    assert [len(read.commit.patches) for read in described] == [0] * len(described)
    steps = [read.commit.step for read in found if read not in described]
    assert steps == sorted({*range(4, steps[-1] + 1, 4), *(read.commit.step for read in described)})
    if dtype == "int8":
        # The first compares everything; later ones have the rows of four steps of 16 samples.
        rows = [
            sum(patch.count for patch in read.commit.patches if patch.table)
            for read in found
            if read not in described
        ]
        assert max(rows[1:]) < rows[0]
        assert all(patch.rows for read in found for patch in read.commit.patches if patch.table)
    # Publishing changes nothing of the training.
    alone = tmp_path / "alone"
    command[command.index(str(out))] = str(alone)
    assert main(command) == 0
    ours, theirs = (load_checkpoint(latest_checkpoint(r / "checkpoints")) for r in (out, alone))
    assert all(torch.equal(value, theirs.model[name]) for name, value in ours.model.items())
    assert torch.equal(ours.rng, theirs.rng)


def test_a_continued_run_publishes_to_the_same_log(trained, repository, tmp_path, capsys):
    models, out = repository(), tmp_path / "run"
    data = write_criteo(tmp_path / "next.tsv", 100, seed=1)
    assert main(["train", "--continue", str(trained / "first"), f"data.path={data}", "--out", str(out),
                 "--quiet", "--publish", str(models / "ads"), "--publish-every", "3steps"]) == 0  # fmt: skip
    steps = [read.commit.step for read in commits(models)]
    assert steps[0] == 18  # behind the first run's 15
    check(models, out, capsys)


def test_a_trainer_goes_on_with_the_compacted_version(trained, repository, tmp_path, capsys):
    models, out = repository(), tmp_path / "run"
    options = live_options(models / "ads", None, every_s=None, every_steps=3)
    writer = options.open()
    commit = writer.commit

    def commit_and_compact(dense, *, step, newest_example_s):
        commit(dense, step=step, newest_example_s=newest_example_s)
        if step == 12:  # behind the checkpoint of step 10
            assert main(["compact", "--repository", str(models), "--model", "ads"]) == 0
        if step == 15:  # its tables have other types
            shutil.copytree(trained / "int8b/ads/1", models / "ads/3")

    writer.commit = commit_and_compact
    config = load_config(trained / "tiny.yaml", ["train.seed=5"])
    train(config, out, progress=False, publish=type(options)(open=lambda: writer, every_steps=3))
    told = capsys.readouterr().err
    assert "goes on with the log of ads 2" in told
    assert told.count("version 3 is passed over (a table's type is not that of version 2") == 1
    shutil.rmtree(models / "ads/3")
    assert commits(models)[-1].commit.step == 12
    later = commits(models, version=2)
    assert [read.commit.number for read in later] == list(range(1, len(later) + 1))
    assert later[0].commit.step == 15
    assert sum(patch.count for patch in later[0].commit.patches if patch.table) > 0
    check(models, out, capsys, version=2)


def test_scales_in_the_graph_cannot_be_published(trained, tmp_path, capsys):
    models = tmp_path / "fp8"
    models.mkdir()
    assert main(["package-model", str(trained / "first"), "--repository", str(models), "--name", "ads",
                 "--no-evaluate", "--device", "cuda", "--dense-dtype", "fp8"]) == 0  # fmt: skip
    command = [
        "train",
        "--config",
        str(trained / "tiny.yaml"),
        "--out",
        str(tmp_path / "run"),
        "--quiet",
    ]
    assert main([*command, "--publish", str(models / "ads"), "--publish-every", "4steps"]) != 0
    assert "has dense layers in fp8, whose scales are measured" in capsys.readouterr().err


def _train_on_rank(folder, repository, sharding):
    config = load_config(folder / "tiny.yaml", [f"train.sharding={sharding}", "train.epochs=1"])
    options = live_options(repository / "ads", None, every_s=None, every_steps=5)
    train(config, repository / "run", progress=False, publish=options)


@pytest.mark.parametrize("sharding", ["row_wise", "column_wise"])
def test_on_two_ranks(trained, repository, capsys, sharding):
    models = repository()
    run_on_ranks(2, _train_on_rank, trained, models, sharding)
    check(models, models / "run", capsys)
    described = [read for read in commits(models) if COMMIT_PACKAGE_RECORD in read.contents]
    assert described
    assert not any(read.commit.patches for read in described)


def _train_and_be_killed(place, arguments):
    """Train until something is called, and no further."""

    def end(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def name_no_file(publisher, *given):
        file._publish = end
        return publish_package(publisher, *given)

    publish_package = Publisher.publish_package
    if place == "before the checkpoint":
        run.save_checkpoint = end
    elif place == "behind the checkpoint":
        live.LiveWriter.checkpoint = lambda *_, **__: end()
    else:  # while it is described
        Publisher.publish_package = name_no_file
    main(arguments)


def test_what_killed_trainers_left_undone_is_completed(trained, repository, tmp_path, capsys):
    models, out = repository(), tmp_path / "run"
    command = ["train", "--quiet", "--out", str(out), "--publish", str(models / "ads"),
               "--publish-every", "5steps"]  # fmt: skip
    how = ["--config", str(trained / "tiny.yaml")]
    version, log = models / "ads/1", models / "ads/1/log"
    for place, steps in {
        "before the checkpoint": [5, 10],
        "behind the checkpoint": [5, 10, 5, 10],  # there was none, so it begins again
        "while it is described": [5, 10, 5, 10],  # before it trains
    }.items():
        process = process_context().Process(
            target=_train_and_be_killed, args=(place, [*command, *how])
        )
        process.start()
        process.join(PATIENCE_S)
        assert process.exitcode == -signal.SIGKILL, place
        assert [read.commit.step for read in commits(models)] == steps
        assert not [read for read in commits(models) if COMMIT_PACKAGE_RECORD in read.contents]
        how = ["--resume"]
    assert hidden(log)
    assert hidden(version)
    # Whoever publishes that checkpoint describes it; all its rows are there.
    copy = tmp_path / "copy"
    shutil.copytree(models, copy)
    last = latest_checkpoint(out / "checkpoints")
    capsys.readouterr()
    at = ["--repository", str(copy), "--model", "ads"]
    assert main(["publish", str(last), *at, "--no-evaluate"]) == 0
    assert "ads 1.5, 0 rows changed" in capsys.readouterr().out
    assert main(["compact", *at]) == 0
    assert capsys.readouterr().out.endswith("the state 1.5\n")
    # So does the trainer, before it goes on.
    assert main([*command, "--resume"]) == 0
    check(models, out, capsys)
    found = commits(models)
    assert [read.commit.number for read in found] == list(range(1, len(found) + 1))
    described = [read.commit.step for read in found if COMMIT_PACKAGE_RECORD in read.contents]
    assert described == [10, 15, 20, 30]
    assert found[4].commit.step == 10
    assert hidden(log) == hidden(version) == []


def hidden(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_a_rolled_back_trainer_publishes_no_more_until_it_is_resumed(
    trained, repository, tmp_path, capsys
):
    models, out = repository(), tmp_path / "run"
    log = models / "ads/1/log"
    options = live_options(models / "ads", None, every_s=None, every_steps=3)
    writer = options.open()
    steps = []
    commit = writer.commit

    def commit_and_roll_back(dense, *, step, newest_example_s):
        steps.append(step)
        commit(dense, step=step, newest_example_s=newest_example_s)
        if step == 6:
            write_fence(log, {2: read_commit(log / "00000002.commit").sha256})

    writer.commit = commit_and_roll_back
    config = load_config(trained / "tiny.yaml", [])
    asked = iter([*[False] * 12, *[True] * 99])
    train(config, out, progress=False, should_stop=lambda: next(asked),
          publish=type(options)(open=lambda: writer, every_steps=3))  # fmt: skip
    assert "was rolled back; nothing more is published" in capsys.readouterr().err
    assert [read.commit.step for read in commits(models)] == [3]
    assert steps[-1] > 6
    assert main(["train", "--resume", "--out", str(out), "--quiet",
                 "--publish", str(models / "ads")]) == 0  # fmt: skip
    check(models, out, capsys)
    assert commits(models)[1].commit.number == 3


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--publish-every", "5steps"], "--publish-every is for --publish DIR/MODEL"),
        (["--publish", "nowhere/ads"], "cannot be read"),
        (["--publish", "AT", "model.rows=51"], "another model, as table 't_C1' shows"),
        (["--publish", "AT", "model.over_layers=[4]"], "another model, as the size of 'linear_"),
        (["--publish", "AT", "model.over_layers=[8,8,8]"], "another model, as 'linear_"),
        (["--publish", "AT", "train.average={kind: ema, decay: 0.9, every: 1}"], "train.average"),
        (["--publish", "AT", "--publish-every", "5"], "give 30s or 1000steps"),
        (["--publish", "AT", "--publish-every", "0s"], "give 30s or 1000steps"),
    ],
)
def test_what_cannot_be_published(trained, repository, capsys, flags, words):
    models = repository()
    flags = [str(models / "ads") if flag == "AT" else flag for flag in flags]
    command = [sys.executable, "-m", "tessera", "train", "--config", str(trained / "tiny.yaml")]
    assert refused([*command[3:], "--quiet", "--out", str(models / "run"), *flags]) == 2
    assert words in capsys.readouterr().err
    log = models / "ads/1/log"
    assert not log.exists() or not commits(models)


def refused(arguments):
    """The exit status, of the command or of its parser."""
    try:
        return main(arguments)
    except SystemExit as end:
        return end.code
