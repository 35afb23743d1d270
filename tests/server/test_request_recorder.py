"""Files of recorded requests: their bytes, where they are cut, their bounds, and disks that fail."""

import errno
import os
import shutil

import pytest

from tessera.errors import UserError
from tessera.serving.server.observe.record_files import (
    NoRoomError,
    RecordFiles,
    RecordOptions,
    check_record_folder,
)
from tessera.serving.server.observe.record_format import (
    HEADER_BYTES,
    RecordedCall,
    RecordingHeader,
    read_header,
    read_records,
    record_head,
    recording_header,
    records_of,
    sealed_record,
)
from tessera.serving.server.observe.request_recorder import RequestRecorder
from tests.server.test_log_writer import wait_until

HEADER = RecordingHeader(7, 1_000, 0.5)


class Log:
    """Keeps the events."""

    def __init__(self):
        self.events = []

    def warning(self, event, **_):
        self.events.append(event)

    info = warning


def call(message=b"message", **fields):
    told = {"arrival_ns": 258, "method": "ModelInfer", "protocol": "rest", "model": "ranker"}
    return RecordedCall(
        **{**told, "version": "3", "request_id": "an id", **fields}, message=message
    )


def record(message=b"message"):
    return sealed_record(record_head(call(message)), message)


def options(folder, share=1.0, file_bytes=1 << 20, folder_bytes=1 << 22):
    return RecordOptions(str(folder), share, file_bytes, folder_bytes)


def test_every_byte_is_determined():
    # cpp_server/tests/record_test.cc expects the same bytes.
    assert (
        recording_header(HEADER).hex()
        == "544553535245430a0100000007000000e803000000000000000000000000e03fdade4f9e"
    )
    assert record().hex() == (
        "23000000e966e5380201000000000000020206000100050072616e6b657233616e2069646d657373616765"
    )


def test_a_file_that_is_cut_anywhere_is_read_up_to_its_last_whole_record():
    content = recording_header(HEADER) + record(b"first") + record(b"second")
    assert list(records_of(content)) == [call(b"first"), call(b"second")]
    assert read_header(content) == HEADER
    first_end = HEADER_BYTES + len(record(b"first"))
    for size in range(len(content)):
        if size < HEADER_BYTES:
            with pytest.raises(ValueError, match="does not begin"):
                list(records_of(content[:size]))
        else:
            assert len(list(records_of(content[:size]))) == (size >= first_end)
    for at in range(HEADER_BYTES, len(content)):
        changed = bytearray(content)
        changed[at] ^= 1
        assert len(list(records_of(bytes(changed)))) == (at >= first_end)


def test_the_folder_keeps_to_its_bound(tmp_path):
    bounds = options(tmp_path, file_bytes=4_096, folder_bytes=12_288)
    files, others = RecordFiles(bounds, HEADER), RecordFiles(bounds, RecordingHeader(9, 0, 1.0))
    others.write(record(b"of another process"))
    (kept,) = tmp_path.iterdir()
    for _ in range(50):
        files.write(record(b"x" * 1_000))
        sizes = [path.stat().st_size for path in tmp_path.iterdir()]
        assert max(sizes) <= 4_096
        assert sum(sizes) <= 12_288
        assert all(list(read_records(path)) for path in tmp_path.iterdir())
    assert len(sizes) == 3
    assert kept in tmp_path.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    # Files that are being written to are not removed.
    third, fourth = RecordFiles(bounds, HEADER), RecordFiles(bounds, HEADER)
    third.write(record())
    with pytest.raises(NoRoomError, match="leave no room in 12288 bytes"):
        fourth.write(record())
    for each in (files, others, third, fourth):
        each.close()


def test_what_a_disk_does_not_take_leaves_no_part(tmp_path, monkeypatch):
    files = RecordFiles(options(tmp_path), HEADER)
    files.write(record(b"first"))
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    write = os.write

    def full_disk(descriptor, content):
        if len(content) < 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content[: len(content) - 5])

    monkeypatch.setattr(os, "write", full_disk)
    with pytest.raises(OSError, match="No space left"):
        files.write(record(b"second"))
    monkeypatch.undo()
    assert path.read_bytes() == before
    files.write(record(b"third"))
    assert len(list(tmp_path.iterdir())) == 2
    files.close()


def test_what_is_put_is_written_or_counted(tmp_path):
    folder, log = tmp_path / "new", Log()
    recorder = RequestRecorder(options(folder), log)
    assert recorder.draws()
    for _ in range(10):
        recorder.put(0.0, call())
    recorder.put(0.0, call(b"x" * (1 << 20)))
    recorder.put(0.0, call(model="x" * 65_536))
    wait_until(
        lambda: recorder.counts() == {"written": 10, "dropped": 2, "bytes": 10 * len(record())}
    )
    (path,) = folder.iterdir()
    assert list(read_records(path)) == [call(arrival_ns=0)] * 10
    shutil.rmtree(folder)
    for dropped in (3, 4, 5):
        recorder.put(0.0, call())
        wait_until(lambda dropped=dropped: recorder.counts()["dropped"] == dropped)
    assert log.events == ["records_not_written"]
    recorder.close()
    recorder.put(0.0, call())
    assert recorder.counts()["dropped"] == 6


def test_the_share_decides(tmp_path):
    none, half = (RequestRecorder(options(tmp_path, share), Log()) for share in (0.0, 0.5))
    assert not any(none.draws() for _ in range(1_000))
    assert abs(sum(half.draws() for _ in range(10_000)) - 5_000) < 500  # ten standard deviations
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for name in ("file", "no/folder"):
        with pytest.raises(UserError, match="give --record another folder"):
            check_record_folder(str(tmp_path / name))
    check_record_folder("")
