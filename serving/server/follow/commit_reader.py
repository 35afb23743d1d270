"""Reads the files of commits in a process of its own, so that their bytes never wait for this one's interpreter.

Reading, hashing and comparing a commit takes milliseconds, in some hundred calls that each give the interpreter's lock
away and take it again; a thread that stands back for others and is made to wait for a CPU while it holds that lock
stops every answer of the server.  So another process does that, and hands over memory in which everything
was compared: a file without a name, which both see for a moment and this one alone holds afterwards.  The rows and
their numbers come first in it, to be used where they lie; then the golden answers and a description in JSON,
which are copied.

The process is forked by `PackageChecker`'s, which ends with the server, and it ends with that one.  It reads one commit
after the other until its channel is closed, while CPUs have nothing else to do (`idle_process`).  One that has too little
of a CPU for that is killed, and one of `ASIDE_NICENESS` reads for a while.  Where a process has died another one takes its
place; where none can be had, the file is read in this process.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tessera.serving.commits.file import (
    Bytes,
    CommitError,
    OpenedCommit,
    ReadCommit,
    last_row,
    open_commit,
    read_commit,
)
from tessera.serving.package.commit import COMMIT_GOLDEN_RECORD, Commit, Patch
from tessera.serving.package.manifest import GoldenInfo
from tessera.serving.package.pace import Pace, stand_aside
from tessera.serving.package.signed_record import encode_fields
from tessera.serving.server.idle_process import Patience, Starvation, be_idle

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_MESSAGE_BYTES = 1 << 16
_ALIGNMENT_BYTES = 64
_ALLOCATED_BYTES = 1 << 20  # at once; the next piece waits for its turn
_PATIENCE = Patience(share=0.02, length_s=0.1)
_STARVED_S = 30.0
"""For so long no process is idle after one that had too little of a CPU."""
_MAPPED_BYTES = 64 << 10  # less is copied: the system has room for some 65,000 mappings


class CommitReader:
    """This process's side; any thread.

    Args:
        start: starts a process that runs `answer_reads`, and gives the channel to it; raises `OSError` where there
            is none to be had.
        trusted_keys: of which one must have signed a commit, where it is read here; the other process has its own.
    """

    def __init__(
        self,
        start: Callable[[], socket.socket],
        trusted_keys: Sequence[Ed25519PublicKey] | None,
    ) -> None:
        self._start = start
        self._keys = trusted_keys
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._idle_from = 0.0  # seconds of ``time.monotonic``

    def read(self, path: Path, *, pause_s: float = 0.0) -> ReadCommit:
        """As `read_commit`; blocks.

        Args:
            path: the commit's file.
            pause_s: for so long the reading pauses for others that are answered meanwhile.

        Raises:
            CommitError: see `read_commit`.
            MemoryError: there is none for it, or the process that reads it is ended again and again.
        """
        for _ in range(2):  # it may have died long ago, and of something else
            try:
                with self._lock:
                    told, descriptors = self._ask(path=str(path), pause_s=pause_s)
            except OSError:
                return read_commit(path, self._keys, Pace(pause_s) if pause_s else None)
            try:
                if "handed" in told:
                    return _take(told["handed"], descriptors[0])
                if "refused" in told:
                    raise _refusal(path, told["refused"])
                if "memory" in told:
                    raise MemoryError(told["memory"])
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        raise MemoryError("the process that reads it is ended each time")

    def _ask(self, **order: object) -> tuple[dict[str, Any], list[int]]:
        """What the process says; nothing where it has died, and the next call starts another."""
        if time.monotonic() >= self._idle_from:
            try:
                return self._ask_one(**order, idle=True)
            except _StarvedError:
                self._idle_from = time.monotonic() + _STARVED_S
        return self._ask_one(**order, idle=False)

    def _ask_one(self, *, idle: bool, **order: object) -> tuple[dict[str, Any], list[int]]:
        if self._channel is None:
            self._channel = self._start()
        told: dict[str, Any] = {}
        descriptors: list[int] = []
        try:
            _tell(self._channel, **order, idle=idle)
            pid = _receive(self._channel)[0].get("reading")
            if pid is not None:
                if idle:
                    _wait_for(self._channel, pid)
                told, descriptors = _receive(self._channel)
        except OSError:  # it died
            pass
        finally:
            if not told:
                self._channel.close()
                self._channel = None
        return told, descriptors

    def close(self) -> None:
        """End the process once it has read what it reads."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()
                self._channel = None


class _StarvedError(Exception):
    """The process had too little of a CPU, and was killed."""


def _wait_for(channel: socket.socket, pid: int) -> None:
    """Until process ``pid``, which has the other end, says something.

    Raises:
        _StarvedError: it had too little of a CPU, and was killed.
        OSError: it has died.
    """
    starvation = Starvation(pid, _PATIENCE)
    while not select.select([channel], [], [], _PATIENCE.length_s)[0]:
        if starvation.seen():
            os.kill(pid, signal.SIGKILL)  # its end is open, so it is there
            raise _StarvedError


def _refusal(path: Path, told: Mapping[str, Any]) -> CommitError:
    error = CommitError(path, told["reason"], told["refusal"])
    if told["errno"] is not None:  # the file could not be read, which says nothing about its bytes
        error.__cause__ = OSError(told["errno"], os.strerror(told["errno"]))
    return error


def _take(handed: Mapping[str, int], descriptor: int) -> ReadCommit:
    """The commit in the memory of ``descriptor``; what was copied is given back at once."""
    mapped = handed["mapped"]
    golden = _pread(descriptor, handed["golden"], mapped)
    about = json.loads(_pread(descriptor, handed["about"], mapped + handed["golden"]))
    memory: Bytes
    if mapped < _MAPPED_BYTES:
        memory = np.frombuffer(bytearray(_pread(descriptor, mapped, 0)), np.uint8)
    else:
        os.ftruncate(descriptor, mapped)
        # Unlike Python's mmap, it keeps no descriptor for as long as the memory is held.
        memory = torch.from_file(
            f"/proc/self/fd/{descriptor}", shared=True, size=mapped, dtype=torch.uint8
        ).numpy()
    contents = {name: memory[begin:end] for name, (begin, end) in about["places"].items()}
    contents[COMMIT_GOLDEN_RECORD] = np.frombuffer(golden, np.uint8)
    fields = dict(about["commit"])
    fields["patches"] = tuple(Patch(**patch) for patch in fields["patches"])
    fields["golden"] = GoldenInfo(**fields["golden"])
    return ReadCommit(
        commit=Commit(**fields, records={}),
        sha256=about["sha256"],
        contents=contents,
        last_rows=about["last_rows"],
    )


def _pread(descriptor: int, size: int, offset: int) -> bytes:
    content = b""
    while len(content) < size:
        piece = os.pread(descriptor, size - len(content), offset + len(content))
        assert piece, "the other process has made it as long as it says"
        content += piece
    return content


def answer_reads(channel: socket.socket, trusted_keys: Sequence[Ed25519PublicKey] | None) -> int:
    """The other process's side: read what is asked for until nobody can ask any more; returns its status."""
    stand_aside()
    while order := channel.recv(_MESSAGE_BYTES):
        job = json.loads(order)
        if job["idle"]:
            be_idle()
        _tell(channel, reading=os.getpid())
        try:
            _read(channel, Path(job["path"]), trusted_keys, Pace(job["pause_s"]))
        except CommitError as error:
            cause = error.__cause__
            refused = {
                "reason": error.reason,
                "refusal": error.refusal,
                "errno": cause.errno if isinstance(cause, OSError) else None,
            }
            _tell(channel, refused=refused)
        except (MemoryError, OSError) as error:
            _tell(channel, memory=str(error) or "no memory left")
    return 0


def _tell(channel: socket.socket, **message: object) -> None:
    channel.send(json.dumps(message).encode())


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A message, and the descriptors that came with it; nothing where the other end has closed."""
    message, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 1)
    return json.loads(message) if message else {}, descriptors


def _read(
    channel: socket.socket,
    path: Path,
    trusted_keys: Sequence[Ed25519PublicKey] | None,
    pace: Pace,
) -> None:
    opened = open_commit(path, trusted_keys)
    opened.records.pace = pace
    opened.records.check_headers(opened.commit.records)
    places, mapped = _places(opened.commit)
    golden_bytes = opened.commit.records[COMMIT_GOLDEN_RECORD].bytes
    descriptor = os.memfd_create("tessera-commit", os.MFD_CLOEXEC)
    try:
        size = mapped + golden_bytes
        for begin in range(0, size, _ALLOCATED_BYTES):  # or the first write would end this process
            os.posix_fallocate(descriptor, begin, min(_ALLOCATED_BYTES, size - begin))
            pace.rest()
        last_rows = _check_into(
            opened, descriptor, size, {**places, COMMIT_GOLDEN_RECORD: (mapped, size)}
        )
        about = json.dumps(
            {
                "sha256": opened.sha256,
                "commit": _without_records(opened.commit),
                "places": places,
                "last_rows": last_rows,
            }
        ).encode()
        written = 0
        while written < len(about):
            written += os.pwrite(descriptor, about[written:], size + written)
        handed = {"mapped": mapped, "golden": golden_bytes, "about": len(about)}
        socket.send_fds(channel, [json.dumps({"handed": handed}).encode()], [descriptor])
    finally:
        os.close(descriptor)


def _places(commit: Commit) -> tuple[dict[str, tuple[int, int]], int]:
    """Where the records of patches begin and end, and how much room they take."""
    places: dict[str, tuple[int, int]] = {}
    used = 0
    for patch in commit.patches:
        for name in (patch.rows, patch.bytes):
            if name and name not in places:
                end = used + commit.records[name].bytes
                places[name] = (used, end)
                used = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return places, used


def _check_into(
    opened: OpenedCommit, descriptor: int, size: int, places: Mapping[str, tuple[int, int]]
) -> dict[str, int | None]:
    """Compare all contents, and keep them in the memory; returns what `last_row` says of each list of rows."""
    memory = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)

    def into(entry: Any) -> memoryview | None:
        place = places.get(entry.name)
        return None if place is None else memory[slice(*place)].data

    opened.records.check_some(opened.commit.records, into=into, progress=lambda _: None)
    return {
        patch.rows: last_row(memory[slice(*places[patch.rows])])
        for patch in opened.commit.patches
        if patch.rows
    }


def _without_records(commit: Commit) -> dict[str, Any]:
    fields = encode_fields(commit, commit.format_version)
    del fields["records"], fields["signature"]
    return fields
