"""SHA-256 of contents, as a whole and in chunks, so that many threads can check one large record.

SHA-256 goes through its bytes in order, some 2 GB/s at best, and a package's tables are one record per
shard.  The manifest therefore names the hash of every chunk of a large record beside that of the
whole, and whoever loads the package compares the chunks, each where a thread is free.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from tessera.cpus import usable_cpus
from tessera.serving.package.pace import stand_aside

CHUNK_BYTES = 8 << 20
"""Part of the format.  4 ms of hashing: no thread waits long for the last one, and 100 GB of tables
still are a manifest of less than a megabyte."""

_MAX_THREADS = 8  # more than a disk or a memory can feed


def chunk_sizes(content_bytes: int) -> list[int]:
    """Bytes of each chunk of a content: none where it is no larger than one."""
    if content_bytes <= CHUNK_BYTES:
        return []
    whole, rest = divmod(content_bytes, CHUNK_BYTES)
    return [CHUNK_BYTES] * whole + ([rest] if rest else [])


class ContentHash:
    """The hashes of one record's content that the manifest names.

    Args:
        content_bytes: how many bytes `update` will be given in all.
    """

    def __init__(self, content_bytes: int) -> None:
        self._left = chunk_sizes(content_bytes)
        self._whole = hashlib.sha256()
        self._chunk = hashlib.sha256()
        self._chunks: list[str] = []

    def update(self, piece: bytes | memoryview, *, beside: Executor | None = None) -> None:
        """The content's next bytes; a thread of ``beside`` computes one of the two hashes meanwhile."""
        if beside is None:
            self._whole.update(piece)
            self._update_chunks(piece)
            return
        whole = beside.submit(self._whole.update, piece)
        self._update_chunks(piece)
        whole.result()

    def _update_chunks(self, piece: bytes | memoryview) -> None:
        rest = memoryview(piece)
        while self._left and rest:
            size = min(self._left[0], len(rest))
            self._chunk.update(rest[:size])
            rest = rest[size:]
            self._left[0] -= size
            if not self._left[0]:
                self._chunks.append(self._chunk.hexdigest())
                self._chunk = hashlib.sha256()
                del self._left[0]

    def sha256(self) -> str:
        """The SHA-256 of all bytes, in lower-case hexadecimal."""
        return self._whole.hexdigest()

    def chunks(self) -> tuple[str, ...]:
        """The SHA-256 of each chunk of `chunk_sizes`, in lower-case hexadecimal."""
        return tuple(self._chunks)


def in_threads(tasks: Sequence[Callable[[], None]], *, others: bool) -> None:
    """Run ``tasks``, begun in their order.

    Args:
        tasks: any number of them.
        others: whether they are worth other threads beside this one.

    Raises:
        Exception: what the first task, in their order, that failed has raised; those behind it may
            not have been begun.
    """
    lock = threading.Lock()
    waiting = iter(enumerate(tasks))
    failures: dict[int, BaseException] = {}

    def work() -> None:
        while True:
            with lock:
                number, task = (None, None) if failures else next(waiting, (None, None))
            if number is None or task is None:
                return
            try:
                task()
            except BaseException as failure:  # noqa: BLE001 - raised below, in the caller's thread
                failures[number] = failure

    count = min(_MAX_THREADS, usable_cpus(), len(tasks)) if others else 1
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if failures:
        try:
            raise failures[min(failures)]
        finally:
            failures.clear()  # Its traceback refers to them: what it holds would wait for a collection of garbage.


class FileHash:
    """SHA-256 of a package's whole file, found in a thread that stands back for all others.

    Nothing that serves waits for it: what runs was compared with the manifest's hashes.  It is what
    ``sha256sum MODEL.pt`` prints, for people who want to know which file this is.

    Args:
        compute: gives the hash, lower-case hex; called once, in that thread.
    """

    def __init__(self, compute: Callable[[], str]) -> None:
        self._compute: Callable[[], str] | None = compute
        self._lock = threading.Lock()
        self._listeners: list[tuple[Callable[[str], None], Callable[[Exception], None]]] = []
        self._found: str | None = None
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="file hash", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        stand_aside()
        assert self._compute is not None
        found, failure = None, None
        try:
            found = self._compute()
        except Exception as error:  # noqa: BLE001 - told, and raised where it is waited for
            failure = error
        self._compute = None  # and with it what was hashed
        with self._lock:
            self._found, self._failure = found, failure
            listeners, self._listeners = self._listeners, []
        for on_found, on_failure in listeners:
            self._call(on_found, on_failure)

    def _call(
        self, on_found: Callable[[str], None], on_failure: Callable[[Exception], None]
    ) -> None:
        if self._failure is not None:
            on_failure(self._failure)
        elif self._found is not None:
            on_found(self._found)

    def tell(
        self, on_found: Callable[[str], None], on_failure: Callable[[Exception], None]
    ) -> None:
        """Call one of the two: at once where the outcome is known, else later in the hash's thread.

        Args:
            on_found: called with the hash in lower-case hex.
            on_failure: called with what computing it has raised.
        """
        with self._lock:
            if self._found is None and self._failure is None:
                self._listeners.append((on_found, on_failure))
                return
        self._call(on_found, on_failure)

    def known(self) -> str | None:
        """The hash in lower-case hex; None: not known yet, or not to be had."""
        return self._found

    def wait(self) -> str:
        """The hash, once it is known.

        Raises:
            Exception: what computing it has raised.
        """
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._found is not None
        return self._found
