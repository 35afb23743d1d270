"""Versions of a repository of models: numbers, atomicity, and what killed publishers leave."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.errors import UserError
from tessera.serving.packaging.write import publish
from tessera.serving.packaging.write.publish import publishing

KILLED = """
import os, signal, sys
from pathlib import Path
from tessera.serving.packaging.write.publish import publishing
with publishing(Path(sys.argv[1]), "ranker") as new:
    new.draft.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""

TWENTY = """
import sys
from pathlib import Path
from tessera.serving.packaging.write.publish import publishing
for _ in range(20):
    with publishing(Path(sys.argv[1]), "ranker") as new:
        new.draft.write_text(f"{sys.argv[2]} {new.number}")
"""


def publish_one(repository: Path, version: int | None = None, content: bytes = b"package") -> Path:
    with publishing(repository, "ranker", version) as new:
        new.draft.write_bytes(content)
    return new.path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def grow_old(folder: Path, age_s: float) -> None:
    for path in (*folder.rglob("*"), folder):
        then = path.stat().st_mtime - age_s
        os.utime(path, (then, then))


def test_the_next_number_is_the_highest_and_one(tmp_path: Path) -> None:
    assert publish_one(tmp_path) == tmp_path / "ranker" / "1" / "model.pt"
    assert publish_one(tmp_path, 9, b"ninth").read_bytes() == b"ninth"
    assert publish_one(tmp_path, 4).parent.name == "4"
    # None of these is a version.
    for name in ("012", "0", "x11", ".12", "13.old"):
        (tmp_path / "ranker" / name).mkdir()
    assert publish_one(tmp_path).parent.name == "10"
    assert names(tmp_path / "ranker" / "10") == ["model.pt"]


def test_a_version_appears_as_a_whole(tmp_path: Path) -> None:
    with publishing(tmp_path, "ranker", 3) as new:
        new.draft.write_bytes(b"package")
        assert all(name.startswith(".") for name in names(tmp_path / "ranker"))
        assert not new.path.exists()
    assert names(tmp_path / "ranker") == ["3"]


def test_files_and_folders_are_on_the_disk_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    model = tmp_path / "ranker"

    def watched(path: Path) -> None:
        steps.append(f"{path.relative_to(tmp_path)} with {names(model)[-1]}")

    monkeypatch.setattr(publish, "sync", watched)
    publish_one(tmp_path, 3)
    assert steps == [
        "ranker/.3.partial with .3.partial",
        "ranker with 3",
        ". with 3",
    ]


@pytest.mark.parametrize("before", [0, 2])
def test_a_failure_leaves_the_repository_as_it_was(tmp_path: Path, before: int) -> None:
    for _ in range(before):
        publish_one(tmp_path)
    with pytest.raises(IsADirectoryError), publishing(tmp_path, "ranker") as new:
        new.draft.parent.write_bytes(b"an error of the system, but none of the repository's")
    assert names(tmp_path) == (["ranker"] if before else [])
    if before:
        assert names(tmp_path / "ranker") == ["1", "2"]


def test_a_number_is_given_once(tmp_path: Path) -> None:
    publish_one(tmp_path, 5, b"first")
    with pytest.raises(
        UserError, match=r"--version 5: \S+/ranker/5 exists, .* leave --version out"
    ):
        publish_one(tmp_path, 5)
    assert (tmp_path / "ranker" / "5" / "model.pt").read_bytes() == b"first"
    with publishing(tmp_path, "ranker") as sixth, publishing(tmp_path, "ranker") as seventh:
        with pytest.raises(UserError, match="--version 6: another package-model is writing"):
            publish_one(tmp_path, 6)
        for new in (sixth, seventh):
            new.draft.write_text(str(new.number))
    assert names(tmp_path / "ranker") == ["5", "6", "7"]


def test_publishers_at_once_get_different_numbers(tmp_path: Path) -> None:
    children = [
        subprocess.Popen([sys.executable, "-c", TWENTY, str(tmp_path), name]) for name in "ab"
    ]
    assert [child.wait() for child in children] == [0, 0]
    versions = sorted(int(name) for name in names(tmp_path / "ranker"))
    # A number may have been reserved when the next was chosen, so there are no gaps either.
    assert versions == list(range(1, 41))
    texts = [(tmp_path / "ranker" / str(n) / "model.pt").read_text().split() for n in versions]
    assert [int(number) for _, number in texts] == versions
    assert [sum(name == who for name, _ in texts) for who in "ab"] == [20, 20]


def test_a_killed_publisher_leaves_a_hidden_folder_that_is_tidied_when_old(tmp_path: Path) -> None:
    publish_one(tmp_path)
    child = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert child.returncode == -signal.SIGKILL
    model = tmp_path / "ranker"
    assert names(model) == [".2.partial", "1"]
    publish_one(tmp_path)
    assert names(model) == [".2.partial", "1", "3"]
    with pytest.raises(
        UserError, match=r"or was killed a moment ago; .* or remove \S+\.2\.partial"
    ):
        publish_one(tmp_path, 2)
    grow_old(model / ".2.partial", publish.TIDY_UNLOCKED_AFTER_S + 1)
    publish_one(tmp_path, 2)
    assert names(model) == ["1", "2", "3"]


def test_what_is_being_written_is_not_tidied_however_long_it_takes(tmp_path: Path) -> None:
    with publishing(tmp_path, "ranker") as slow:
        slow.draft.write_bytes(b"slow")
        grow_old(slow.draft.parent, publish.TIDY_UNKNOWN_AFTER_S + 1)
        publish_one(tmp_path)
    assert names(tmp_path / "ranker") == ["1", "2"]


def test_without_locks_age_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        del descriptor, operation
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    hidden = tmp_path / "ranker" / ".1.partial"
    hidden.mkdir(parents=True)
    grow_old(hidden, publish.TIDY_UNLOCKED_AFTER_S + 1)
    publish_one(tmp_path)
    assert names(tmp_path / "ranker") == [".1.partial", "2"]
    grow_old(hidden, publish.TIDY_UNKNOWN_AFTER_S)
    publish_one(tmp_path)
    assert names(tmp_path / "ranker") == ["2", "3"]


def test_what_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none is not a folder; make it first"):
        publish_one(tmp_path / "none")
    with pytest.raises(UserError, match="--version is 0; give a whole number from 1 to 92233"):
        publish_one(tmp_path, 0)
    with pytest.raises(UserError, match="--version is 9223372036854775808; give"):
        publish_one(tmp_path, 2**63)
    (tmp_path / "ranker").write_text("a file")
    expected = re.escape(f"--repository {tmp_path}: {tmp_path / 'ranker'} cannot be written: ")
    with pytest.raises(UserError, match=expected):
        publish_one(tmp_path)
