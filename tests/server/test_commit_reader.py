"""Commits that another process reads are what `read_commit` reads, and nothing that ends it stops the log."""

import contextlib
import dataclasses
import os
import random
import signal
import socket
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from tessera.serving.bench.commits import SyntheticPublisher
from tessera.serving.commits.file import CommitError, read_commit
from tessera.serving.package.commit import COMMIT_GOLDEN_RECORD
from tessera.serving.package.signing import generate_keys, read_public_key
from tessera.serving.server.follow import commit_reader
from tessera.serving.server.follow.commit_reader import CommitReader, answer_reads
from tessera.serving.server.forked import fork
from tessera.serving.server.idle_process import Patience, be_idle
from tests.package_factory import make_package


@pytest.fixture(scope="module")
def commit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m") / "1"
    folder.mkdir()
    package, _ = make_package(folder.parent, name="m")
    (folder / "model.pt").symlink_to(package)
    return SyntheticPublisher(folder).publish(rows=50, newest_example_s=12.5)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """On a machine whose CPUs are all in use no process is idle, or taken for one that has too little of a CPU."""
    monkeypatch.setattr(commit_reader, "_PATIENCE", Patience(share=0.0, length_s=0.1))
    monkeypatch.setattr(commit_reader, "be_idle", lambda: None)


class Processes:
    """Starts what reads, and knows the ids; those of ``dying`` end when they are first asked."""

    def __init__(self, keys=None, dying=0):
        self.pids = []
        self._keys = keys
        self._dying = dying

    def start(self):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        dies = len(self.pids) < self._dying

        def body():
            ours.close()
            if dies:
                theirs.recv(1 << 16)
                os.kill(os.getpid(), signal.SIGKILL)
            return answer_reads(theirs, self._keys)

        with (
            warnings.catch_warnings()
        ):  # of forking beside threads, of which the new one needs none
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pids.append(fork(body, at_parents_end=signal.SIGKILL))
        theirs.close()
        return ours

    def ends(self):
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]


def same(found, expected):
    assert found.sha256 == expected.sha256
    assert found.commit == dataclasses.replace(expected.commit, records={}, signature=None)
    found.check_fits({patch.record: 1 << 40 for patch in expected.commit.patches})
    for name, content in found.contents.items():
        assert np.array_equal(content, expected.contents[name])
    for patch in expected.commit.patches:
        assert np.array_equal(found.new_bytes(patch), expected.new_bytes(patch))
        assert patch.rows in found.last_rows or not patch.rows
    assert COMMIT_GOLDEN_RECORD in found.contents


def open_descriptors():
    """The number of each and what it is open on, but for the one that lists them."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add((entry.name, str(entry.readlink())))
    return found


@pytest.mark.parametrize("mapped_bytes", [1, 1 << 30])
@pytest.mark.parametrize("pause_s", [0.0, 1.0])
def test_the_other_process_reads_the_same(commit, monkeypatch, mapped_bytes, pause_s):
    monkeypatch.setattr(commit_reader, "_MAPPED_BYTES", mapped_bytes)
    processes = Processes()
    reader = CommitReader(processes.start, None)
    found = reader.read(commit, pause_s=pause_s)
    descriptors = open_descriptors()
    more = [reader.read(commit, pause_s=pause_s) for _ in range(3)]
    # What is held takes none; one that a test before this one has left may close meanwhile.
    assert open_descriptors() - descriptors == set()
    reader.close()
    assert processes.ends() == [0]
    for one in (found, *more):
        same(one, read_commit(commit))
    patch = found.commit.patches[0]
    found.new_bytes(patch)[:] = (
        0  # what changes places with rows is written to, and is nobody else's
    )
    same(more[0], read_commit(commit))


def test_what_is_refused_is_refused_in_the_same_words(commit, tmp_path):
    processes = Processes()
    reader = CommitReader(processes.start, None)
    good = commit.read_bytes()
    draw = random.Random(0)
    path = tmp_path / "00000001.commit"
    files = []
    for _ in range(60):
        bad = bytearray(good)
        bad[draw.randrange(len(good))] ^= 1 << draw.randrange(8)
        files.append(bytes(bad))
    for bad in (*files, b"", good[:-1], good[: len(good) // 2]):
        path.write_bytes(bad)
        with pytest.raises(CommitError) as expected:
            read_commit(path)
        with pytest.raises(CommitError) as found:
            reader.read(path)
        assert str(found.value) == str(expected.value)
        assert found.value.refusal == expected.value.refusal
    path.unlink()
    with pytest.raises(CommitError, match="cannot be read: No such file") as missing:
        reader.read(path)
    assert isinstance(missing.value.__cause__, FileNotFoundError)  # is tried again
    same(reader.read(commit), read_commit(commit))
    reader.close()
    assert processes.ends() == [0]


def test_a_commit_without_a_trusted_signature_is_refused_there(commit, tmp_path):
    generate_keys(tmp_path / "key.pem", tmp_path / "public.pem")
    keys = [read_public_key(tmp_path / "public.pem")]
    processes = Processes(keys)
    reader = CommitReader(processes.start, keys)
    with pytest.raises(CommitError) as failure:
        reader.read(commit)
    assert failure.value.refusal == "unsigned"
    reader.close()
    assert processes.ends() == [0]


def test_another_process_takes_the_place_of_one_that_died(commit):
    processes = Processes(dying=1)
    reader = CommitReader(processes.start, None)
    same(reader.read(commit), read_commit(commit))  # one died while it read
    os.kill(processes.pids[1], signal.SIGKILL)
    os.waitid(os.P_PID, processes.pids[1], os.WEXITED | os.WNOWAIT)
    same(reader.read(commit), read_commit(commit))  # and one before it was asked
    reader.close()
    assert processes.ends() == [-signal.SIGKILL, -signal.SIGKILL, 0]


def test_the_process_reads_while_cpus_have_nothing_else_to_do(commit, monkeypatch):
    monkeypatch.setattr(commit_reader, "be_idle", be_idle)
    processes = Processes()
    reader = CommitReader(processes.start, None)
    reader.read(commit)
    assert os.sched_getscheduler(processes.pids[0]) == os.SCHED_IDLE
    reader.close()
    assert processes.ends() == [0]


def test_one_that_has_no_cpu_for_that_is_killed_and_another_reads(commit, monkeypatch):
    read = commit_reader._read

    def read_unless_idle(*given):
        if os.sched_getscheduler(0) == os.SCHED_IDLE:
            time.sleep(60)  # as one that waits for a CPU
        read(*given)

    monkeypatch.setattr(commit_reader, "_read", read_unless_idle)
    monkeypatch.setattr(commit_reader, "be_idle", be_idle)
    monkeypatch.setattr(commit_reader, "_PATIENCE", Patience(share=0.02, length_s=0.1))
    processes = Processes()
    reader = CommitReader(processes.start, None)
    descriptors = open_descriptors()
    for _ in range(2):  # the second is not tried in vain
        same(reader.read(commit, pause_s=1.0), read_commit(commit))
    assert len(open_descriptors() - descriptors) == 1
    reader.close()
    assert processes.ends() == [-signal.SIGKILL, 0]


def test_a_file_that_ends_each_process_is_left_for_later(commit):
    processes = Processes(dying=2)
    reader = CommitReader(processes.start, None)
    with pytest.raises(MemoryError, match="ended each time"):
        reader.read(commit)
    same(reader.read(commit), read_commit(commit))
    reader.close()
    assert processes.ends() == [-signal.SIGKILL, -signal.SIGKILL, 0]


def test_where_no_process_is_to_be_had_this_one_reads(commit, tmp_path, monkeypatch):
    def none():
        raise BrokenPipeError

    reader = CommitReader(none, None)
    expected = read_commit(commit)
    rests = []
    monkeypatch.setattr(commit_reader.Pace, "rest", lambda _: rests.append(1))
    assert reader.read(commit, pause_s=1.0).commit == expected.commit
    assert rests  # others are made room for
    generate_keys(tmp_path / "key.pem", tmp_path / "public.pem")
    with pytest.raises(CommitError) as failure:
        CommitReader(none, [read_public_key(tmp_path / "public.pem")]).read(commit)
    assert failure.value.refusal == "unsigned"
    reader.close()
