"""publish and compact as a user runs them: base and log are, byte for byte, the package of the checkpoint."""

import json
import shutil

import pytest

from tessera.cli import main
from tessera.serving.bench.commits import SyntheticPublisher
from tessera.serving.commits.chain import commit_name
from tessera.serving.commits.fence import read_fence
from tessera.serving.commits.file import read_commit
from tessera.training.trainer.files import list_checkpoints
from tests import forked_program
from tests.trainer.tiny_runs import TINY, write_criteo


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The checkpoints of a run, by their steps."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_criteo(folder / "clicks.tsv", 300)
    (folder / "tiny.yaml").write_text(TINY.replace("PATH", str(data)))
    out = folder / "run"
    assert main(["train", "--config", str(folder / "tiny.yaml"), "--out", str(out), "--quiet",
                 "train.keep_checkpoints=9"]) == 0  # fmt: skip
    return list(list_checkpoints(out / "checkpoints").values())


@pytest.fixture(scope="module")
def packaged(checkpoints, tmp_path_factory):
    """Version 1 of a model, and the package that `package-model` makes of the last checkpoint as version 2.

    Each by a process of its own: torch numbers the classes that one process has scripted.
    """
    repository = tmp_path_factory.mktemp("repository")
    for checkpoint in (checkpoints[0], checkpoints[-1]):
        arguments = ["package-model", checkpoint, "--repository", repository, "--name", "ads"]
        done = forked_program.run(arguments)
        assert done.returncode == 0, done.stderr
    return repository


@pytest.fixture
def repository(packaged, tmp_path):
    """A repository with version 1 alone."""
    shutil.copytree(packaged / "ads" / "1", tmp_path / "models" / "ads" / "1")
    return tmp_path / "models"


def run(command, *arguments):
    return main([command, *map(str, arguments)])


def test_base_and_log_are_the_package_of_the_checkpoint(
    checkpoints, packaged, repository, capsys, tmp_path
):
    at = ("--repository", repository, "--model", "ads")
    assert run("publish", checkpoints[0], *at) == 0
    assert "nothing has changed since ads 1.0" in capsys.readouterr().out
    assert not list((repository / "ads/1/log").iterdir())
    assert run("publish", checkpoints[1], *at, "--newest-example-s", "7.5", "--no-evaluate") == 0
    assert "ads 1.1" in capsys.readouterr().out
    assert run("publish", checkpoints[-1], *at, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    log = repository / "ads/1/log"
    assert told["commit"] == 2
    assert told["path"] == str(log / commit_name(2))
    assert told["bytes"] == (log / commit_name(2)).stat().st_size
    assert told["rows"] > 10
    first, second = (read_commit(log / commit_name(number)) for number in (1, 2))
    assert (first.commit.newest_example_s, second.commit.newest_example_s) == (7.5, None)
    assert first.commit.step < second.commit.step
    # Only what has changed is in it, and all of it as it is stored.
    assert second.commit.previous == first.sha256
    assert run("publish", checkpoints[-1], *at) == 0
    assert "nothing has changed since ads 1.2" in capsys.readouterr().out

    assert run("compact", *at) == 0
    assert "the state 1.2" in capsys.readouterr().out
    expected = (packaged / "ads/2/model.pt").read_bytes()
    assert (repository / "ads/2/model.pt").read_bytes() == expected
    # The next publisher goes on with the highest version.
    assert run("publish", checkpoints[-1], *at) == 0
    assert "nothing has changed since ads 2.0" in capsys.readouterr().out
    assert run("compact", *at, "--base", 1, "--to", 1, "--version", 9) == 0
    assert run("publish", checkpoints[1], *at, "--no-evaluate") == 0
    assert "nothing has changed since ads 9.0" in capsys.readouterr().out


def test_compacting_what_cannot_be(packaged, repository, capsys):
    at = ("--repository", repository, "--model", "ads")
    assert run("compact", *at) == 2
    assert "ads 1 has no commit that was made of a checkpoint" in capsys.readouterr().err
    SyntheticPublisher(repository / "ads/1").publish(rows=5)
    assert run("compact", *at) == 2
    assert "ads 1 has no commit that was made of a checkpoint" in capsys.readouterr().err
    assert run("compact", *at, "--to", 1) == 2
    assert "commit 1 of ads 1 was not made of a checkpoint" in capsys.readouterr().err
    assert run("compact", "--repository", repository, "--model", "other") == 2
    assert "cannot be read" in capsys.readouterr().err
    assert run("compact", *at, "--base", 7) == 2
    assert "has the versions 1" in capsys.readouterr().err
    assert [path.name for path in (repository / "ads").iterdir()] == ["1"]


def test_pruning_leaves_what_is_wanted(checkpoints, repository, capsys):
    at = ("--repository", repository, "--model", "ads")
    assert run("publish", checkpoints[1], *at, "--no-evaluate") == 0
    serving = repository / "ads/serving.yaml"
    serving.write_text("labels: {stable: 1}\n")
    assert run("compact", *at, "--prune") == 2
    assert "still wants version 1" in capsys.readouterr().err
    serving.unlink()
    assert run("compact", *at, "--prune") == 0
    assert [path.name for path in (repository / "ads").iterdir()] == ["2"]


def test_a_broken_log_is_mended_by_a_publisher(checkpoints, repository, capsys):
    at = ("--repository", repository, "--model", "ads")
    publisher = SyntheticPublisher(repository / "ads/1")
    paths = [publisher.publish(rows=5) for _ in range(3)]
    paths[1].unlink()
    assert run("publish", checkpoints[0], *at, "--no-evaluate") == 0
    printed = capsys.readouterr().out
    assert f"the log was broken ({paths[1]} is missing)" in printed
    assert "00000004.commit" in printed
    third = read_commit(paths[2])
    assert read_fence(paths[0].parent).commits == {2: "", 3: third.sha256}
    # What the synthetic commits did is gone: this is the package of the checkpoint again.
    fourth = read_commit(paths[0].parent / commit_name(4))
    assert fourth.commit.previous == read_commit(paths[0]).sha256
    assert run("publish", checkpoints[0], *at, "--no-evaluate") == 0
    assert "nothing has changed since ads 1.4" in capsys.readouterr().out


def test_another_model_is_refused(repository, packaged, tmp_path, capsys):
    data = write_criteo(tmp_path / "clicks.tsv", 100)
    (tmp_path / "tiny.yaml").write_text(
        TINY.replace("PATH", str(data)).replace("rows: 50", "rows: 51")
    )
    out = tmp_path / "run"
    assert main(["train", "--config", str(tmp_path / "tiny.yaml"), "--out", str(out), "--quiet",
                 "train.epochs=1"]) == 0  # fmt: skip
    capsys.readouterr()
    assert run("publish", out, "--repository", repository, "--model", "ads", "--no-evaluate") == 2
    assert "is not that of version 1, which a commit cannot change" in capsys.readouterr().err
    assert not list((repository / "ads/1/log").iterdir())
