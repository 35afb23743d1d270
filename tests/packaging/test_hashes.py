"""Hashes in chunks: large records checked by several threads, and the file's own hash behind them."""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import random
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest

from tessera.cli import main
from tessera.serving.package import hashes
from tessera.serving.package.hashes import ContentHash, FileHash, chunk_sizes, in_threads
from tessera.serving.package.layout import ArchiveWriter
from tessera.serving.package.loading import load_package, open_checked
from tessera.serving.package.manifest import MANIFEST_RECORD, Manifest
from tessera.serving.package.records import PackageError
from tests.package_factory import make_package
from tests.packaging.archives import read_records, with_manifest, write_records

CHUNK = 1000


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "CHUNK_BYTES", CHUNK)


@pytest.mark.parametrize("cpus", [1, 2, 8])
def test_a_large_content_is_written_and_hashed_by_threads(small_chunks, monkeypatch, cpus):
    monkeypatch.setattr("tessera.serving.package.layout._THREADS_FROM_BYTES", 5 * CHUNK)
    monkeypatch.setattr("tessera.serving.package.layout.usable_cpus", lambda: cpus)
    pieces = [random.Random(n).randbytes(700) for n in range(9)]
    content = b"".join(pieces)
    stream = io.BytesIO()
    written = ArchiveWriter(stream).add("data/0", pieces, len(content))
    assert stream.getvalue().endswith(content)
    assert written.bytes == len(content)
    assert written.crc32 == zlib.crc32(content)
    assert written.sha256 == digest(content)
    chunks = [content[begin : begin + CHUNK] for begin in range(0, len(content), CHUNK)]
    assert written.chunks == tuple(map(digest, chunks))


def test_a_disk_that_becomes_full_is_told_of(monkeypatch):
    class Full(io.BytesIO):
        def write(self, content: Any) -> int:
            if content == b"content":
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(content)

    monkeypatch.setattr("tessera.serving.package.layout._THREADS_FROM_BYTES", 1)
    monkeypatch.setattr("tessera.serving.package.layout.usable_cpus", lambda: 2)
    with pytest.raises(OSError, match="No space left"):
        ArchiveWriter(Full()).add("data/0", [b"content"], 7)


@pytest.fixture
def divided(small_chunks: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A package whose larger records have chunks, checked by several threads."""
    monkeypatch.setattr("tessera.serving.package.archive._WORTH_THREADS_BYTES", 0)
    monkeypatch.setattr("tessera.serving.package.opening.LARGE_BYTES", 2000)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    path, _ = make_package(tmp_path, dim=16, name="divided")
    return path


@pytest.mark.parametrize("size", [0, 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK + 17])
@pytest.mark.usefixtures("small_chunks")
def test_a_content_in_pieces_of_any_size(size: int) -> None:
    draw = random.Random(size)
    content = draw.randbytes(size)
    made = ContentHash(size)
    begin = 0
    while begin < size:
        end = min(size, begin + draw.choice([1, 7, 100, CHUNK, 2 * CHUNK]))
        made.update(content[begin:end])
        begin = end
    chunks = [content[at : at + CHUNK] for at in range(0, size, CHUNK)] if size > CHUNK else []
    assert made.sha256() == digest(content)
    assert made.chunks() == tuple(map(digest, chunks))
    assert chunk_sizes(size) == list(map(len, chunks))


@pytest.mark.parametrize("others", [False, True])
def test_the_first_failure_is_raised_whichever_thread_is_faster(
    monkeypatch: pytest.MonkeyPatch, *, others: bool
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    done: list[int] = []
    begun = threading.Event()

    def task(number: int) -> None:
        if number == 4:
            # Fails only after task 5 has, where there are threads for both.
            begun.wait(5 if others else 0)
            raise ValueError("four")
        if number == 5:
            begun.set()
            raise ValueError("five")
        done.append(number)

    in_threads([functools.partial(task, number) for number in range(4)], others=others)
    assert sorted(done) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="four"):
        in_threads([functools.partial(task, number) for number in range(4, 50)], others=others)
    assert len(done) < 46


def test_the_manifest_names_the_chunks_of_large_records(divided: Path) -> None:
    records = read_records(divided)
    manifest = Manifest.from_bytes(records[MANIFEST_RECORD])
    assert any(info.chunks for info in manifest.records.values())
    for name, info in manifest.records.items():
        content = records[name]
        found = [digest(content[at : at + CHUNK]) for at in range(0, len(content), CHUNK)]
        assert info.sha256 == digest(content)
        assert info.chunks == (tuple(found) if len(content) > CHUNK else ())


def test_the_files_hash_comes_from_memory_or_from_the_file(divided: Path) -> None:
    expected = digest(divided.read_bytes())
    loaded = load_package(divided)
    assert loaded.sha256 == expected
    assert loaded.file_hash.known() == expected
    checked = open_checked(divided)
    assert checked.sha256() == expected
    records = read_records(divided)
    some = {name: content for name, content in records.items() if name < "d"}
    assert checked.records.file_sha256(some) == expected


def test_a_changed_byte_is_found_in_its_chunk(divided: Path, tmp_path: Path) -> None:
    entry = max(open_checked(divided).records.entries, key=lambda entry: entry.bytes)
    content = bytearray(divided.read_bytes())
    content[entry.content_offset + 3 * CHUNK - 1] ^= 1
    content[entry.end_offset - 1] ^= 1
    path = tmp_path / "m.pt"
    path.write_bytes(content)
    message = rf"record '{entry.name}' was changed: SHA-256 \w+ of bytes 2000 to 3000 of \d+, the"
    with pytest.raises(PackageError, match=message):
        open_checked(path)


def test_a_file_that_changes_before_it_is_hashed_has_no_hash(divided: Path, tmp_path: Path) -> None:
    path = write_records(tmp_path / "m.pt", read_records(divided))
    checked = open_checked(path)
    entry = max(checked.records.entries, key=lambda entry: entry.bytes)
    with path.open("r+b") as stream:
        stream.seek(entry.content_offset)
        stream.write(b"changed")
    with pytest.raises(PackageError, match="was changed while it was being loaded"):
        checked.sha256()


def test_chunks_that_are_not_those_of_the_content_are_refused(
    divided: Path, tmp_path: Path
) -> None:
    def one_less(data: dict[str, Any]) -> None:
        data["records"]["data.pkl"]["chunks"].pop()

    path = with_manifest(divided, tmp_path / "m.pt", one_less)
    with pytest.raises(PackageError, match=r"names \d+ chunks of record 'data.pkl', whose \d+ byt"):
        open_checked(path)


def test_verify_compares_large_records_as_a_whole_too(
    divided: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def another(data: dict[str, Any]) -> None:
        data["records"]["data.pkl"]["sha256"] = "0" * 64

    assert main(["verify", str(divided)]) == 0
    path = with_manifest(divided, tmp_path / "m.pt", another)
    open_checked(path)  # every byte was compared
    assert main(["verify", str(path)]) == 1
    assert "the manifest is wrong about record 'data.pkl'" in capsys.readouterr().err


def unexpected(outcome: object) -> None:
    raise AssertionError(outcome)


def test_a_file_hash_is_told_once_it_is_known() -> None:
    go, told = threading.Event(), threading.Event()

    def compute() -> str:
        go.wait(30)
        return "ab"

    made = FileHash(compute)
    found: list[str] = []

    def listener(sha256: str) -> None:
        found.append(sha256)
        told.set()

    made.tell(listener, unexpected)
    assert made.known() is None
    assert not found
    go.set()
    assert made.wait() == made.known() == "ab"
    assert told.wait(30)
    made.tell(found.append, unexpected)
    assert found == ["ab", "ab"]


def test_a_file_hash_that_cannot_be_had_says_why(divided: Path) -> None:
    records = open_checked(divided).records
    go = threading.Event()

    def compute() -> str:
        go.wait(30)
        return records.file_sha256({})

    made = FileHash(compute)
    failures: list[Exception] = []
    made.tell(unexpected, failures.append)
    assert not failures
    divided.unlink()
    go.set()
    for _ in range(2):
        with pytest.raises(PackageError, match=r"divided-1\.pt: cannot be read: No such file"):
            made.wait()
    assert made.known() is None
    made.tell(unexpected, failures.append)
    first, second = failures
    assert first is second
    assert isinstance(first, PackageError)
