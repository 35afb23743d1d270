"""Checks packages in processes of their own, so that no package can harm the process that answers.

A process that is forked before the server has any thread waits for jobs.  For each it forks another one, which
reads the package, compares its hashes and runs the model for the first time, while CPUs have nothing else to do (`run_when_idle`).  A model that
never ends, or ends its process, ends that one.  A model that has run is known by the hash of its manifest, which has the hash of
every byte of it, and does not run again when it comes again.  Where its large tables are in memory as well, there is nothing left to
check here, and no process is made.  What was compared is handed over in memory (`CheckedContents`).
The process that reads commits (`CommitReader`) is forked there as well.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from tessera.serving.package.archive import FileIdentity, file_identity
from tessera.serving.package.handover import CheckedContents, SharedContents
from tessera.serving.package.loading import Loading
from tessera.serving.package.opening import LARGE_BYTES
from tessera.serving.package.pace import LOAD_PART, Pace, stand_aside
from tessera.serving.package.records import PackageError, Records
from tessera.serving.package.time_limit import TimeLimit, limited
from tessera.serving.server.follow.commit_reader import CommitReader, answer_reads
from tessera.serving.server.forked import fork
from tessera.serving.server.idle_process import is_idle, run_when_idle

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_MESSAGE_BYTES = 1 << 20
_PROGRESS_PARTS = 64
_FAILED = 1
_MOST_KEPT = 1_024
"""More than anybody goes to and fro between."""
_HASH_PART = 1 / 4
"""The hash of a file has this part of the share of work aside: nobody waits for it, and loads go on beside it."""
_MOST_HASHED_HERE = 16 << 20
"""Larger files are hashed in a process of their own; to make one takes longer than to hash so many bytes."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """How packages are checked; see `load_package`."""

    verify_golden: bool = True
    allow_ops: Collection[str] = ()
    trusted_keys: Sequence[Ed25519PublicKey] | None = field(default=None, repr=False)
    load_timeout_s: float


class PackageChecker:
    """The process that waits for jobs.  To be made while this process has a single thread.

    Args:
        options: for all packages.
    """

    def __init__(self, options: CheckOptions) -> None:
        ours, theirs = _channel()

        def body() -> int:
            ours.close()
            return _wait_for_jobs(theirs, options)

        self._lock = threading.Lock()
        self._jobs = ours
        self._trusted_keys = options.trusted_keys
        self._have_run = _Kept[str, bool]()  # the hashes of manifests
        self._file_hashes = _Kept[FileIdentity, str]()
        # The next one starts with what this process has by now; its pages are shared as long as neither writes.
        gc.freeze()
        self.pid = fork(body, at_parents_end=signal.SIGKILL)
        theirs.close()

    def close(self) -> None:
        """End the process, and with it what it checks."""
        self._jobs.close()
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def _ask(self, **order: object) -> socket.socket:
        """The channel to a new process that does ``order``; raises `OSError` where there is none to be had."""
        ours, theirs = _channel()
        try:
            with theirs, self._lock:
                socket.send_fds(self._jobs, [json.dumps(order).encode()], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        return ours

    @contextlib.contextmanager
    def _job(self, kind: str, path: Path, *, beside_others: bool, has_run: str = "") -> Any:
        try:
            ours = self._ask(kind=kind, path=str(path), beside=beside_others, has_run=has_run)
        except OSError as error:
            raise PackageError(path, "cannot be checked: the process for it has ended") from error
        with ours:
            yield ours

    def commit_reader(self) -> CommitReader:
        """Reads commits in a process that is started with the first one."""
        return CommitReader(lambda: self._ask(kind="commits"), self._trusted_keys)

    def has_run(self, manifest_sha256: str) -> bool:
        """Whether the model of the package with this manifest has run here, in a process of its own."""
        return self._have_run.get(manifest_sha256) is not None

    @contextlib.contextmanager
    def check(
        self,
        path: Path,
        manifest_sha256: str,
        progress: Callable[[int], None],
        *,
        beside_others: bool,
    ) -> Any:
        """Check the package, and give its `CheckedContents`; blocks.

        Args:
            path: a package for CPUs.
            manifest_sha256: of the manifest that the caller has read.
            progress: told the bytes that were compared.
            beside_others: whether other versions answer meanwhile, for which the work pauses.

        Raises:
            PackageError: it is not served; the message says why.
        """
        has_run = manifest_sha256 if self.has_run(manifest_sha256) else ""
        with self._job("check", path, beside_others=beside_others, has_run=has_run) as channel:
            while True:
                message, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 1)
                told: dict[str, Any] = json.loads(message) if message else {}
                if "progress" in told:
                    progress(told["progress"])
                elif "checked" in told:
                    break
                elif "refused" in told:
                    raise PackageError(path, told["refused"])
                else:
                    raise PackageError(
                        path,
                        "ends the process that loads it; its operators do not run on this machine",
                    )
        self._have_run.keep(told["checked"], True)
        try:
            yield CheckedContents(
                descriptor=descriptors[0],
                offsets=told["offsets"],
                manifest_sha256=told["checked"],
            )
        finally:
            os.close(descriptors[0])

    def file_sha256(self, path: Path) -> str:
        """SHA-256 of the file, which is read again, with pauses; blocks for as long as that takes.

        That of a file that was read before and is unchanged since, as far as the file system tells, is known.

        Raises:
            PackageError: it cannot be read, or is not what its manifest says.
        """
        identity = _identity(path)
        known = None if identity is None else self._file_hashes.get(identity)
        if known is not None:
            return known
        if identity is None or identity.size <= _MOST_HASHED_HERE:
            sha256 = _sha256_of(path, Pace(part=_HASH_PART))
        else:
            sha256 = self._sha256_from_process(path)
        if identity is not None and identity == _identity(path):
            self._file_hashes.keep(identity, sha256)
        return sha256

    def _sha256_from_process(self, path: Path) -> str:
        with self._job("hash", path, beside_others=True) as channel:
            told = json.loads(channel.recv(_MESSAGE_BYTES) or b"{}")
        if "sha256" not in told:
            raise PackageError(path, told.get("refused", "could not be read"))
        sha256: str = told["sha256"]
        return sha256


def _identity(path: Path) -> FileIdentity | None:
    """See `file_identity`; None: there is no such file."""
    try:
        return file_identity(path)
    except OSError:
        return None


class _Kept(Generic[_Key, _Value]):
    """What is known of the last `_MOST_KEPT` keys.  Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[_Key, _Value] = {}  # the newest last

    def get(self, key: _Key) -> _Value | None:
        """What is known of ``key``."""
        with self._lock:
            return self._values.get(key)

    def keep(self, key: _Key, value: _Value) -> None:
        """Know ``value`` of ``key`` from now on."""
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = value
            if len(self._values) > _MOST_KEPT:
                del self._values[next(iter(self._values))]


def _channel() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _wait_for_jobs(jobs: socket.socket, options: CheckOptions) -> int:
    # A terminal's Ctrl-C goes to the whole group; this process ends with the server.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    while True:
        order, descriptors, _, _ = socket.recv_fds(jobs, _MESSAGE_BYTES, 1)
        if not order:
            return 0
        with socket.socket(fileno=descriptors[0]) as channel:
            job = json.loads(order)
            body = functools.partial(_run, job, channel, options)
            if job["kind"] == "commits":
                body = functools.partial(_read_commits, jobs, channel, options)
            fork(body, at_parents_end=signal.SIGKILL)


def _read_commits(jobs: socket.socket, channel: socket.socket, options: CheckOptions) -> int:
    jobs.close()  # a server whose process for jobs has ended is to see that
    return answer_reads(channel, options.trusted_keys)


def _run(job: dict[str, Any], channel: socket.socket, options: CheckOptions) -> int:
    path = Path(job["path"])

    def body(*, beside: bool = True) -> int:
        if job["kind"] == "check":
            pace = Pace(part=LOAD_PART) if beside else None
            return _check(path, channel, options, job["has_run"], pace)
        return _hash(path, channel, Pace(part=_HASH_PART) if beside else None)

    if not job["beside"]:
        return body(beside=False)
    stand_aside()
    return run_when_idle(body)


def _check(
    path: Path, channel: socket.socket, options: CheckOptions, has_run: str, pace: Pace | None
) -> int:
    torch.set_num_threads(1)
    try:
        return _check_and_hand_over(path, channel, options, has_run, pace)
    except PackageError as error:
        _tell(channel, refused=error.reason)
    except MemoryError as error:
        _tell(channel, refused=f"cannot be loaded: {error or 'no memory left'}")
    return _FAILED


def _check_and_hand_over(
    path: Path, channel: socket.socket, options: CheckOptions, has_run: str, pace: Pace | None
) -> int:
    records = Records(path)
    large = [entry.bytes for entry in records.entries if entry.bytes >= LARGE_BYTES]
    contents = SharedContents(sum(map(SharedContents.room, large)))
    loading = Loading(
        path, trusted_keys=options.trusted_keys, allow_ops=options.allow_ops, memory=contents
    )
    loading.records.pace = pace
    total = sum(entry.bytes for entry in loading.records.entries)
    loading.read(_Progress(channel, total).add)
    names = loading.opening.large_tables()
    manifest_sha256 = hashlib.sha256(loading.records.manifest_bytes()).hexdigest()
    if manifest_sha256 != has_run:
        _run_model(loading, channel, options)
    checked = {
        "checked": manifest_sha256,
        "offsets": dict(zip(names, contents.offsets, strict=True)),
    }
    socket.send_fds(channel, [json.dumps(checked).encode()], [contents.descriptor])
    return 0


def _run_model(loading: Loading, channel: socket.socket, options: CheckOptions) -> None:
    def refuse_endless(line: str) -> None:
        _tell(channel, refused=line)

    limit = TimeLimit(
        seconds=options.load_timeout_s,
        prefix="",
        status=_FAILED,
        tell=refuse_endless,
        of_cpu=is_idle(),
    )
    with limited(limit, loading.path):
        loading.build()
        loading.settle(verify_golden=options.verify_golden)


def _hash(path: Path, channel: socket.socket, pace: Pace | None) -> int:
    try:
        _tell(channel, sha256=_sha256_of(path, pace))
    except PackageError as error:
        _tell(channel, refused=error.reason)
    return 0


def _sha256_of(path: Path, pace: Pace | None) -> str:
    records = Records(path)
    records.pace = pace
    records.check_headers(records.manifest().records)
    return records.file_sha256({})


def _tell(channel: socket.socket, **message: object) -> None:
    with contextlib.suppress(OSError):  # nobody waits for it any more
        channel.send(json.dumps(message).encode())


class _Progress:
    """Tells of the bytes that were compared, some at a time.  Any thread."""

    def __init__(self, channel: socket.socket, total: int) -> None:
        self._channel = channel
        self._step = total // _PROGRESS_PARTS + 1
        self._lock = threading.Lock()
        self._untold = 0

    def add(self, count: int) -> None:
        with self._lock:
            self._untold += count
            if self._untold >= self._step:
                # Raises where nobody waits any more: there is no reason to go on.
                self._channel.send(json.dumps({"progress": self._untold}).encode())
                self._untold = 0
