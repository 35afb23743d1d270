"""The parts of following that need no server: the lock, the memory to go back, devices other than the CPU."""

import dataclasses
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tessera.kernels import reference
from tessera.kernels.ops import load as load_operators
from tessera.serving.commits.file import CommitError
from tessera.serving.package.pace import Pace
from tessera.serving.server.batching.commit_lock import CommitLock, PassState
from tessera.serving.server.follow import version_log
from tessera.serving.server.follow.device_exchange import DeviceExchange, copied, rows_on_device
from tessera.serving.server.follow.exchange import Exchange
from tessera.serving.server.follow.followed_model import (
    FollowedModel,
    StagedCommit,
    UndoRecord,
)
from tessera.serving.server.follow.undo_memory import UndoMemory, UndoRecords
from tessera.serving.server.front.freshness_graph import FreshnessHistory
from tests.patience import PATIENCE_S


def test_a_commit_waits_for_passes_and_comes_before_the_next_ones():
    lock, order = CommitLock(), []
    waits = threading.Event()

    def commit():
        waits.set()
        with lock.exclusive():
            order.append("commit")
            lock.switch(PassState(7))

    def late():
        with lock.shared() as state:
            order.append(state.commit)

    with lock.shared() as first, lock.shared() as second:
        assert (first, second) == (PassState(0), PassState(0))
        writer = threading.Thread(target=commit)
        writer.start()
        assert waits.wait(PATIENCE_S)
        while not lock._writers:  # it has said that it waits
            pass
        reader = threading.Thread(target=late)
        reader.start()
        order.append("passes")
    for thread in (writer, reader):
        thread.join(PATIENCE_S)
    assert order == ["passes", "commit", 7]


def test_passes_that_have_begun_are_waited_for_while_others_begin():
    lock, ended = CommitLock(), threading.Event()

    def wait():
        lock.wait_for_passes()
        ended.set()

    lock.wait_for_passes()  # there are none
    early, late = lock.shared(), lock.shared()
    early.__enter__()
    waiter = threading.Thread(target=wait)
    waiter.start()
    while not lock._turn > 1:  # it waits
        pass
    with lock.shared():  # begins, and ends, meanwhile
        assert not ended.is_set()
    late.__enter__()
    assert not ended.wait(0.05)
    early.__exit__(None, None, None)
    assert ended.wait(PATIENCE_S)  # though another one runs
    late.__exit__(None, None, None)
    waiter.join(PATIENCE_S)
    with lock.exclusive():  # all are gone
        pass


@dataclass(eq=False)
class Kept:
    bytes: int


def test_the_oldest_records_go_first_and_each_version_goes_back_as_far_as_it_can():
    memory, first, second = UndoMemory(100), UndoRecords(), UndoRecords()
    a, b, c, d = Kept(40), Kept(30), Kept(20), Kept(25)
    for records, kept in ((first, a), (second, b), (first, c)):
        memory.keep(records, kept)
    assert memory.held == 90
    assert memory.newest(first, 2) == [c, a]
    memory.keep(second, d)  # has no room beside the oldest
    assert memory.held == 75
    assert memory.newest(first, 2) is None
    assert memory.newest(first, 1) == [c]
    assert memory.newest(second, 2) == [d, b]
    memory.forget(second, 1)
    assert memory.newest(second, 1) == [b]
    memory.forget(second)
    memory.forget(first)
    assert memory.held == 0
    memory.keep(first, Kept(101))
    assert memory.newest(first, 1) is None
    assert memory.held == 0


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    ("count", "width", "stride", "offset"),
    [(1, 9, 9, 0), (40, 20, 32, 16), (7, 300, 300, 3), (50, 64, 64, 8), (20, 6, 10, 2)],
)
def test_rows_on_a_device_are_exchanged_as_the_operator_does(kept, count, width, stride, offset):
    generator = torch.Generator().manual_seed(3)
    size = offset + 49 * stride + width + 3
    memory = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    before = memory.clone()
    chosen = torch.randperm(50, generator=generator)[:count].sort().values
    values = torch.randint(0, 256, (count, width), dtype=torch.uint8, generator=generator)
    expected, old = memory.clone(), values.clone()
    reference.exchange_rows(expected, chosen, old, offset, stride)
    pace, device = Pace(0.0), torch.device("cpu")
    exchange = DeviceExchange.of(
        memory,
        rows_on_device(chosen, device, pace),
        copied(values, device, pace),
        last_row=int(chosen[-1]),
        offset=offset,
        stride=stride,
    )
    if kept:
        exchange.keep()
        assert torch.equal(memory, before)
    exchange.run()
    assert torch.equal(memory, expected)
    undo = UndoRecord(exchanges=[exchange.compact()])
    assert undo.bytes == count * (width + 4)
    assert torch.equal(exchange.values.view(torch.uint8), old)
    exchange.run()
    assert torch.equal(memory, before)
    assert undo.bytes == count * (width + 4)
    assert torch.equal(exchange.values.view(torch.uint8), values)


def test_all_rows_of_a_record_on_a_device_are_exchanged_without_numbers():
    memory = torch.arange(24, dtype=torch.uint8)
    values = torch.arange(100, 116, dtype=torch.uint8).view(2, 8)
    exchange = DeviceExchange.of(memory, None, values.clone(), last_row=1, offset=0, stride=16)
    exchange.run()
    assert memory.tolist() == [*range(100, 108), *range(8, 16), *range(108, 116)]
    exchange.run()
    assert memory.tolist() == list(range(24))


def test_copies_go_to_a_device_in_pieces_with_a_pause_behind_each():
    class Counting(Pace):
        rests = 0

        def rest(self):
            self.rests += 1

    pace = Counting(0.0)
    values = torch.arange(300_000, dtype=torch.int64).view(3, 100_000)
    there = copied(values, torch.device("cpu"), pace)
    assert torch.equal(there, values)
    assert there.data_ptr() != values.data_ptr()
    assert pace.rests == 3  # of a megabyte each
    assert rows_on_device(torch.tensor([1, 2**31]), torch.device("cpu"), pace).tolist()[1] == 2**31


@dataclass
class Row:
    model: str
    version: str
    commit: int | None
    newest_example_s: float | None


def test_freshness_is_drawn_of_ten_minutes():
    now = 1_000.0
    history = FreshnessHistory(lambda: now)
    unknown, none = Row("m", "4", 0, None), Row("m", "5", None, None)
    for _ in range(700):
        now += 1
        history.note([Row("m", "3", 7, now - 2), unknown, none])
    now += 1
    (graph,) = history.graphs([Row("m", "3", 8, now - 1), unknown, none])
    assert (graph.model, graph.version, graph.seconds) == ("m", "3.8", 1)
    points = graph.points.split()
    assert len(points) == 601
    assert points[-1] == "599,0.0"
    history.note([])
    assert history.graphs([Row("m", "3", 8, now - 1)]) == []


def named(folder, monkeypatch, age_s=0.0):
    """A log's first file, which was given its name ``age_s`` seconds ago."""
    (folder / "log").mkdir()
    commit = folder / "log" / "00000001.commit"
    commit.touch()
    named_s = commit.stat().st_ctime
    monkeypatch.setattr(version_log.time, "time", lambda: named_s + age_s)


def log_in(folder, *, beside_others=False, reader=None, **followed):
    """The log in ``folder`` of a model with what is given."""
    log = version_log.VersionLog(
        model="m",
        version=1,
        folder=folder,
        followed=SimpleNamespace(base="b", **followed),
        trusted_keys=None,
        undo=UndoMemory(100),
        reader=reader,
    )
    log.beside_others = beside_others
    return log


@pytest.mark.parametrize(
    ("cause", "again"), [(OSError(5, "Input/output error"), True), (ValueError("changed"), False)]
)
def test_a_file_that_could_not_be_read_is_read_again(tmp_path, monkeypatch, cause, again):
    """What the system could not give says nothing about the file; one whose bytes differ waits for another."""
    reads = []
    seconds = [100.0]

    def read_commit(path, _keys, _pace):
        reads.append(path)
        raise CommitError(path, f"cannot be read: {cause}") from cause

    monkeypatch.setattr(version_log, "read_commit", read_commit)
    monkeypatch.setattr(version_log.time, "monotonic", lambda: seconds[0])
    named(tmp_path, monkeypatch)
    followed = log_in(tmp_path)
    assert followed.step().did is version_log.Did.REFUSED
    assert followed.refused.reason == "damaged"
    assert followed.step().did is version_log.Did.NOTHING
    assert len(reads) == 1
    seconds[0] += 5
    assert followed.step().did is version_log.Did.NOTHING  # told already
    assert len(reads) == (2 if again else 1)


@pytest.mark.parametrize(
    ("age_s", "beside_others", "paused_s"),
    [(0.0, True, 0.5), (0.3, True, 0.2), (0.7, True, 0.0), (-90.0, True, 0.5), (0.0, False, 0.0)],
)
def test_a_commit_that_is_late_is_read_without_pauses(
    tmp_path, monkeypatch, age_s, beside_others, paused_s
):
    asked = []

    class Reader:
        def read(self, path, *, pause_s):
            asked.append(pause_s)
            raise CommitError(path, "is not a commit")

    named(tmp_path, monkeypatch, age_s)
    log_in(tmp_path, beside_others=beside_others, reader=Reader()).step()
    assert asked == [pytest.approx(paused_s, abs=1e-6)]


@pytest.mark.parametrize(
    ("age_s", "beside_others", "paused_s"),
    [
        (0.2, True, 0.55),
        (0.7, True, 0.05),
        (0.8, True, 0.0),
        (-90.0, True, 0.75),
        (0.2, False, 0.0),
    ],
)
def test_rows_of_a_commit_that_is_late_are_written_without_pauses(
    tmp_path, monkeypatch, age_s, beside_others, paused_s
):
    asked = []
    staged = SimpleNamespace(path=tmp_path)

    def put_in(commit, *, pauses_end_s):
        assert commit is staged
        asked.append(pauses_end_s - 100.0)
        raise CommitError(tmp_path, "is not put in")

    named(tmp_path, monkeypatch, age_s)
    monkeypatch.setattr(version_log.time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(version_log, "refusal", lambda *_, **__: None)
    read = SimpleNamespace(commit=None, sha256="c")
    log_in(
        tmp_path,
        beside_others=beside_others,
        reader=SimpleNamespace(read=lambda *_, **__: read),
        stage=lambda *_, **__: staged,
        put_in=put_in,
    ).step()
    assert asked == [pytest.approx(paused_s, abs=1e-6)]


def test_a_model_without_memory_for_its_golden_answers_refuses_the_commit_for_a_while():
    """A bad answer is the commit's fault, want of memory is not."""

    class Starved:
        def forward(self, _batch):
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate")

    model = FollowedModel(runners=[Starved()], memory=[], sizes={}, base="b", verify_golden=True)
    staged = SimpleNamespace(
        exchanges=[],
        golden=(None, {}),
        overlay=None,
        path=Path("c"),
        read=SimpleNamespace(commit=SimpleNamespace(number=1, golden=None)),
    )
    with pytest.raises(MemoryError, match="not enough memory"):
        model.put_in(staged)


def test_what_undoes_a_commit_takes_no_more_than_its_file_and_brings_every_byte_back():
    load_operators()
    generator = torch.Generator().manual_seed(3)
    memory = torch.randint(0, 256, (100 * 68,), dtype=torch.uint8, generator=generator)
    before = memory.clone()
    rows = torch.arange(0, 100, 2)
    values = torch.randint(0, 256, (50, 68), dtype=torch.uint8, generator=generator)
    exchange = Exchange(memory=memory, rows=rows, values=values, offset=0, stride=68)
    exchange.run()
    assert not torch.equal(memory, before)
    undo = UndoRecord.of(
        StagedCommit(path=Path("c"), read=SimpleNamespace(), exchanges=[exchange], golden=None)
    )
    assert undo.bytes == 50 * (68 + 4)  # a row's number has four bytes in the file, too
    undo.exchanges[0].run()
    assert torch.equal(memory, before)
    stored = rows.int()
    beside = dataclasses.replace(exchange, rows=stored)
    assert beside.compact().rows is stored
    far = Exchange(memory=memory, rows=rows + 2**31, values=values, offset=0, stride=68)
    assert torch.equal(far.compact().rows, far.rows)
