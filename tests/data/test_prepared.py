from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tessera.errors import UserError
from tessera.training.data.prepared import PreparedFolder, SourceChangedError, open_or_build


class Builder:
    """A build that can be counted."""

    def __init__(self, text: str = "prepared") -> None:
        self.calls = 0
        self.text = text

    def __call__(self, folder: Path) -> Mapping[str, Any]:
        self.calls += 1
        (folder / "rows.bin").write_text(self.text)
        return {"rows": 7}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.tsv"
    path.write_text("source")
    return path


def prepare(
    source: Path, build: Callable[[Path], Mapping[str, Any]], **options: int
) -> PreparedFolder:
    return open_or_build(
        source.parent / "cache", label="source.tsv", sources=[source], options=options, build=build
    )


def folders(source: Path) -> list[Path]:
    return [path for path in (source.parent / "cache").iterdir() if path.is_dir()]


def test_built_once_then_opened(source: Path) -> None:
    build = Builder()
    first, second = prepare(source, build), prepare(source, build)
    assert build.calls == 1
    assert first == second
    assert first.details == {"rows": 7}
    assert (first.path / "rows.bin").read_text() == "prepared"


def test_another_state_of_the_source_replaces_the_folder(source: Path) -> None:
    old = prepare(source, Builder())
    source.write_text("longer source")
    new = prepare(source, Builder("new"))
    assert (new.path / "rows.bin").read_text() == "new"
    assert not old.path.exists()


def test_another_time_of_the_source_replaces_the_folder(source: Path) -> None:
    build = Builder()
    prepare(source, build)
    os.utime(source, ns=(1, 1))
    prepare(source, build)
    assert build.calls == 2
    assert len(folders(source)) == 1


def test_other_options_have_a_folder_of_their_own(source: Path) -> None:
    paths = {prepare(source, Builder(), option=value).path for value in (1, 2, 1)}
    assert len(paths) == 2
    assert all(path.exists() for path in paths)


@pytest.mark.parametrize("damage", ["truncate", "remove file", "remove manifest", "cut manifest"])
def test_a_damaged_folder_is_reported_and_made_again(
    source: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    build = Builder()
    folder = prepare(source, build).path
    if damage == "truncate":
        os.truncate(folder / "rows.bin", 3)
    elif damage == "remove file":
        (folder / "rows.bin").unlink()
    elif damage == "remove manifest":
        (folder / "manifest.json").unlink()
    else:
        os.truncate(folder / "manifest.json", 20)
    with caplog.at_level(logging.WARNING):
        again = prepare(source, build)
    assert build.calls == 2
    assert (again.path / "rows.bin").read_text() == "prepared"
    assert "preparing the data again" in caplog.text
    assert damage != "truncate" or "rows.bin has 3 bytes instead of 8" in caplog.text


@pytest.mark.parametrize(
    "content",
    [
        *("[]", "3", "null", "{}", '{"files": [], "details": {}}', '{"files": {}, "details": 7}'),
        *("[" * 100_000, '{"files": {"rows.bin": "8"}}', "9" * 5000),
    ],
)
def test_a_manifest_of_another_shape_is_made_again(
    source: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    build = Builder()
    folder = prepare(source, build).path
    (folder / "manifest.json").write_text(content)
    with caplog.at_level(logging.WARNING):
        assert prepare(source, build).path == folder
    assert build.calls == 2
    assert "its manifest.json " in caplog.text
    assert prepare(source, build).path == folder
    assert build.calls == 2


def test_details_that_were_changed_are_made_again(source: Path) -> None:
    build = Builder()
    manifest = prepare(source, build).path / "manifest.json"
    data = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**data, "details": {}}))
    assert prepare(source, build).details == data["details"] != {}


def test_a_failed_build_leaves_nothing(source: Path) -> None:
    def fail(folder: Path) -> Mapping[str, Any]:
        (folder / "rows.bin").write_text("half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        prepare(source, fail)
    assert list(source.parent.iterdir()) == [source]


def test_a_source_that_changes_meanwhile_is_refused(source: Path) -> None:
    def build(folder: Path) -> Mapping[str, Any]:
        source.write_text("changed while it was read")
        return Builder()(folder)

    with pytest.raises(SourceChangedError, match=r"source\.tsv: changed while being read"):
        prepare(source, build)
    assert list(source.parent.iterdir()) == [source]


def test_a_full_disk_is_told_as_such(source: Path) -> None:
    def build(folder: Path) -> Mapping[str, Any]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    with pytest.raises(UserError, match=r"cache_dir=.*no space left"):
        prepare(source, build)
    assert list(source.parent.iterdir()) == [source]


def test_a_cache_folder_that_cannot_be_made_is_told_as_such(source: Path) -> None:
    (source.parent / "cache").write_text("a file is in the way")
    with pytest.raises(UserError, match=r"cache_dir=.*cannot be written to"):
        prepare(source, Builder())


def test_a_missing_source_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.tsv"):
        prepare(tmp_path / "absent.tsv", Builder())


_HANGS_HALF_WAY = """
import sys
from pathlib import Path
from tessera.training.data.prepared import open_or_build
source = Path(sys.argv[1])
def build(folder):
    (folder / "rows.bin").write_text("half")
    print("half way", flush=True)
    sys.stdin.read()
open_or_build(source.parent / "cache", label="source.tsv", sources=[source], options={}, build=build)
"""


def test_a_killed_preparation_leaves_nothing_half_valid(source: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HANGS_HALF_WAY, source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half way\n"
        os.kill(process.pid, signal.SIGKILL)
    (leftover,) = folders(source)
    assert (leftover / "rows.bin").read_text() == "half"
    build = Builder()
    assert (prepare(source, build).path / "rows.bin").read_text() == "prepared"
    assert build.calls == 1
    assert not leftover.exists()
    assert len(folders(source)) == 1


_COUNTS_BUILDS = """
import os, sys
from pathlib import Path
from tessera.training.data.prepared import open_or_build
source = Path(sys.argv[1])
def build(folder):
    with (source.parent / "builds").open("a") as log:
        log.write("built\\n")
    (folder / "rows.bin").write_text("prepared")
    return {}
print("ready", flush=True)
sys.stdin.readline()
found = open_or_build(
    source.parent / "cache", label="source.tsv", sources=[source], options={}, build=build
)
print((found.path / "rows.bin").read_text(), flush=True)
"""


def test_of_several_processes_one_builds_and_all_open(source: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _COUNTS_BUILDS, source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    answers = [process.stdin.write("go\n") and process.stdin.flush() for process in processes]
    answers = [process.communicate()[0] for process in processes]
    assert answers == ["prepared\n"] * 3
    assert (source.parent / "builds").read_text() == "built\n"
