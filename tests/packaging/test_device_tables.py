"""Tables read to devices: the bytes of the file, compared on the way, in bounded memory of the host."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.serving.package import archive, device_tables, hashes
from tessera.serving.package.device_tables import DeviceTables
from tessera.serving.package.layout import ArchiveWriter
from tessera.serving.package.manifest import MANIFEST_RECORD
from tessera.serving.package.records import PackageError, Records
from tessera.serving.package.signed_record import RecordInfo

CHUNK = 1000
STAGED = 300
SIZES = [1, STAGED - 1, STAGED, STAGED + 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 17]
THREADS = 4

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda:0", marks=ON_GPU)]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "CHUNK_BYTES", CHUNK)


@pytest.fixture(params=[False, True], ids=["one thread", "threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many threads read, at most."""
    monkeypatch.setattr(archive, "_WORTH_THREADS_BYTES", 0 if request.param else 1 << 60)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(THREADS)))
    return THREADS if request.param else 1


def tables_of(path: Path, sizes: list[int]) -> Records:
    """An archive with a record of random bytes for each size, its headers compared."""
    draw = random.Random(1)
    infos = {}
    with path.open("w+b") as stream:
        writer = ArchiveWriter(stream)
        for number, size in enumerate(sizes):
            written = writer.add(f"data/{number:02}", [draw.randbytes(size)], size)
            infos[f"data/{number:02}"] = RecordInfo(
                sha256=written.sha256,
                bytes=written.bytes,
                crc32=written.crc32,
                chunks=written.chunks,
            )
        writer.add(MANIFEST_RECORD, [b"{}"], 2)
        writer.finish()
    records = Records(path)
    records.check_headers(infos)
    return records


def names(records: Records) -> list[str]:
    return [entry.name for entry in records.entries if entry.name != MANIFEST_RECORD]


def to(records: Records, device: str) -> Mapping[str, str]:
    return dict.fromkeys(names(records), device)


def plainly(records: Records) -> dict[str, bytes]:
    """The same contents by a plain loop."""
    content = records.path.read_bytes()
    return {
        entry.name: content[entry.content_offset : entry.content_offset + entry.bytes]
        for entry in records.entries
        if entry.name != MANIFEST_RECORD
    }


def damage(records: Records, name: str, byte: int) -> None:
    entry = next(entry for entry in records.entries if entry.name == name)
    content = bytearray(records.path.read_bytes())
    content[entry.content_offset + byte] ^= 1
    records.path.write_bytes(content)


def check_alike(found: Mapping[str, torch.Tensor], records: Records, device: str) -> None:
    expected = plainly(records)
    assert found.keys() == expected.keys()
    for name, table in found.items():
        assert table.dtype == torch.uint8
        assert table.device == torch.device(device)
        assert table.cpu().numpy().tobytes() == expected[name], name


class Made:
    """What was asked of `torch.empty`: tables, and staging buffers, which say whether they are pinned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tables: list[torch.Tensor] = []
        self.buffers: list[torch.Tensor] = []
        self._real: Callable[..., torch.Tensor] = torch.empty
        monkeypatch.setattr(device_tables.torch, "empty", self._empty)

    def _empty(self, *arguments: Any, **options: Any) -> torch.Tensor:
        made = self._real(*arguments, **options)
        (self.buffers if "pin_memory" in options else self.tables).append(made)
        return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("small_chunks")
def test_a_table_is_what_a_plain_loop_reads(
    device: str, size: int, threads: int, tmp_path: Path
) -> None:
    records = tables_of(tmp_path / "m.pt", [size])
    found = DeviceTables(records, to(records, device), staged_bytes=STAGED).read()
    check_alike(found, records, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("small_chunks")
def test_many_tables_are_read_by_threads_with_two_buffers_each(
    device: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = tables_of(tmp_path / "m.pt", [*SIZES, *SIZES, 30 * CHUNK])
    made = Made(monkeypatch)
    told: list[int] = []
    found = DeviceTables(records, to(records, device), staged_bytes=STAGED).read(told.append)
    check_alike(found, records, device)
    assert sum(told) == sum(table.numel() for table in found.values())
    assert len(told) > 2 * len(SIZES) + 30
    assert len(made.tables) == len(found)
    assert 2 <= len(made.buffers) <= 2 * threads
    for buffer in made.buffers:
        assert buffer.numel() == STAGED
        assert buffer.is_pinned() == (device != "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_and_buffers_as_large_as_they_are(device: str, tmp_path: Path) -> None:
    sizes = [(1 << 20) - 1, (1 << 20) + 1, 8 << 20, (20 << 20) + 12345]
    records = tables_of(tmp_path / "m.pt", sizes)
    check_alike(DeviceTables(records, to(records, device)).read(), records, device)


@pytest.mark.parametrize("device", DEVICES)
def test_each_table_goes_to_its_device_and_others_are_left_out(device: str, tmp_path: Path) -> None:
    records = tables_of(tmp_path / "m.pt", [900, 700, 800])
    found = DeviceTables(records, {"data/02": device, "data/00": "cpu"}).read()
    assert {name: str(table.device) for name, table in found.items()} == {
        "data/00": "cpu",
        "data/02": device,
    }
    assert found["data/02"].cpu().numpy().tobytes() == plainly(records)["data/02"]
    assert DeviceTables(records, {}).read() == {}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("byte", [0, CHUNK - 1, 2 * CHUNK + 500, 5 * CHUNK, 5 * CHUNK + 16])
@pytest.mark.usefixtures("small_chunks")
def test_a_changed_byte_is_refused_as_the_check_does(
    device: str, byte: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = tables_of(tmp_path / "m.pt", [CHUNK, 5 * CHUNK + 17, 3 * CHUNK])
    damage(records, "data/01", byte)
    listed = {name: records._listed[name] for name in names(records)}
    with pytest.raises(PackageError) as expected:
        records.check(listed)
    assert f"of bytes {byte // CHUNK * CHUNK} to " in str(expected.value)
    made = Made(monkeypatch)
    tables = DeviceTables(records, to(records, device), staged_bytes=STAGED)
    before = torch.cuda.memory_allocated() if device != "cpu" else 0
    with pytest.raises(PackageError) as found:
        tables.read()
    assert str(found.value) == str(expected.value)
    # Also while somebody holds the error, whose traceback knows the tables.
    assert [table.untyped_storage().nbytes() for table in made.tables] == [0, 0, 0]
    assert (torch.cuda.memory_allocated() if device != "cpu" else 0) <= before
    assert not tables._tables
    assert not tables._unused


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("small_chunks")
def test_a_file_that_becomes_shorter_is_refused(device: str, threads: int, tmp_path: Path) -> None:
    records = tables_of(tmp_path / "m.pt", [CHUNK, 5 * CHUNK + 17])
    entry = records.entries[1]
    with records.path.open("r+b") as stream:
        stream.truncate(entry.content_offset + 2 * CHUNK + 450)
    with pytest.raises(PackageError, match=r"m\.pt: became shorter while it was being read"):
        DeviceTables(records, to(records, device), staged_bytes=STAGED).read()


def test_a_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    records = tables_of(tmp_path / "m.pt", [CHUNK])
    records.path.unlink()
    with pytest.raises(PackageError, match=r"m\.pt: cannot be read: No such file"):
        DeviceTables(records, to(records, "cpu")).read()


def test_what_progress_raises_ends_the_reading(threads: int, tmp_path: Path) -> None:
    def nobody_waits(_: int) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    records = tables_of(tmp_path / "m.pt", [CHUNK, CHUNK])
    with pytest.raises(PackageError, match="Broken pipe"):
        DeviceTables(records, to(records, "cpu")).read(nobody_waits)


class Rests:
    """A pace that counts, and says which threads keep to it."""

    def __init__(self) -> None:
        self.count = 0
        self.threads: set[int] = set()

    def rest(self) -> None:
        self.count += 1
        self.threads.add(threading.get_ident())


@pytest.mark.parametrize("device", DEVICES)
def test_a_pace_is_kept_to_between_pieces_by_one_thread(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "_WORTH_THREADS_BYTES", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(THREADS)))
    size = (9 << 20) + 1
    records = tables_of(tmp_path / "m.pt", [size, 10])
    records.pace = rests = Rests()  # type: ignore[assignment]
    check_alike(DeviceTables(records, to(records, device)).read(), records, device)
    # Of the large one's last chunk and the small one there is one piece at the end.
    assert rests.count == (9 << 20) // archive.PIECE_BYTES + 2
    assert rests.threads == {threading.get_ident()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_memory_that_kernels_still_use_is_written_to_behind_them(tmp_path: Path) -> None:
    size = 64 << 20
    records = tables_of(tmp_path / "m.pt", [size])
    for _ in range(3):
        # Freed on the host while kernels of the current stream still write to it, and then a table's.
        busy = torch.empty(size, dtype=torch.uint8, device="cuda:0")
        torch.cuda._sleep(200_000_000)
        busy.fill_(7)
        place = busy.data_ptr()
        del busy
        found = DeviceTables(records, to(records, "cuda:0")).read()
        assert found["data/00"].data_ptr() == place
        torch.cuda.synchronize()
        check_alike(found, records, "cuda:0")
        del found
