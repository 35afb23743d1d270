"""`tessera rollback` on a repository: later commits are fenced off, and a publisher goes on behind the fence."""

import contextlib

import pytest

from tessera.cli import main
from tessera.serving.bench.commits import SyntheticPublisher
from tessera.serving.commits.chain import StepKind, commit_name, next_step
from tessera.serving.commits.fence import read_fence
from tessera.serving.commits.file import read_commit
from tessera.serving.commits.replay import next_number
from tessera.serving.commits.writer import Facts, write_next
from tessera.serving.packaging.commits.publish import Publisher


def rollback(folder, to, model="m"):
    repository = ("--repository", str(folder.parent.parent))
    return main(["rollback", "--model", model, "--to", to, *repository])


def test_later_commits_are_fenced_off_and_a_publisher_goes_on(version, capsys):
    folder = version()
    publisher = SyntheticPublisher(folder)
    commits = [publisher.publish(rows=3) for _ in range(4)]
    log = commits[0].parent
    assert rollback(folder, "1.2") == 0
    assert f"{log}: 2 commits fenced off; servers that follow it go back to 1.2" in (
        capsys.readouterr().out
    )
    assert read_fence(log).commits == {
        number: read_commit(log / commit_name(number)).sha256 for number in (3, 4)
    }
    names = [path.name for path in log.iterdir()]
    step = next_step(names, read_fence(log), [1, 2, 3, 4])
    assert (step.kind, step.number) == (StepKind.BACK, 2)
    # Nothing is left to be fenced off, and what was fenced off stays so.
    assert rollback(folder, "1.2") == 0
    assert "0 commits fenced off" in capsys.readouterr().out
    # Another publisher begins where the fence leaves the state, with the next free number.
    with contextlib.closing(Publisher(folder)) as other:
        assert other.state.log.number == 2
        path = write_next(other.state, other.log, [], Facts(), number=next_number(other.log))
    assert path.name == commit_name(5)
    assert read_commit(path).commit.previous == read_commit(commits[1]).sha256
    assert rollback(folder, "1.0") == 0
    assert read_fence(log).commits.keys() == {1, 2, 3, 4, 5}


def test_what_cannot_be_gone_back_to_is_one_line(version, capsys):
    folder = version()
    publisher = SyntheticPublisher(folder)
    log = publisher.publish(rows=3).parent
    publisher.publish(rows=3)
    assert rollback(folder, "1.1") == 0
    capsys.readouterr()
    for to, model, words in (
        ("1.2", "m", "commit 2 was fenced off; name one that is in the log"),
        ("1.7", "m", "commit 7 is not in it; name one that is in the log"),
        ("2.1", "m", "has no version 2 of a model 'm'"),
        ("1.1", "n", "has no version 1 of a model 'n'"),
        ("1.1", "../m", "has no version 1 of a model '../m'"),
    ):
        assert rollback(folder, to, model) == 2
        message = capsys.readouterr().err.strip()
        assert words in message
        assert "\n" not in message
    assert read_fence(log).commits.keys() == {2}
    for wrong in ("3", "1.x", "01.1", "1.-1"):
        with pytest.raises(SystemExit) as ended:
            rollback(folder, wrong)
        assert ended.value.code == 2
        assert "give a version and a commit, such as 3.40" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["rollback", "--model", "m", "--to", "1.1"])
    assert "--address --repository is required" in capsys.readouterr().err
