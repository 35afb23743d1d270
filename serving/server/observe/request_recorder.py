"""Records a share of the requests to a folder, so that ``tessera-load --replay`` can send them again: docs/replay.md.

A call puts its message into a bounded queue and goes on; one thread writes what has come in a few milliseconds at once.
What finds no room, fits into no file or cannot be written is dropped and counted; a folder that cannot be written to is
tried again after a second, and told to the log once a minute at most.  ``cpp_server/src/recording`` does the same.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Mapping
from typing import Any

from tessera.serving.server.named_thread import NamedThread
from tessera.serving.server.observe.record_files import (
    RecordFiles,
    RecordOptions,
    check_record_folder,
)
from tessera.serving.server.observe.record_format import (
    RecordedCall,
    RecordingHeader,
    record_head,
    sealed_record,
)

MAX_RECORDS = 8_192
MAX_BYTES = 32 * 1024 * 1024
"""What waits to be written at most."""

_FLUSH_S = 1.0
_GATHER_S = 0.02
_CHUNK_BYTES = 256 * 1024
_PAUSE_S = 1.0
_SILENCE_S = 60.0


class RequestRecorder:
    """Records calls; `draws` and `put` never block.

    Args:
        options: the folder, the share and the bounds.
        log: told when records cannot be written.

    Raises:
        UserError: the folder cannot be written to.
    """

    def __init__(self, options: RecordOptions, log: Any) -> None:
        check_record_folder(options.folder)
        self._share = options.share
        self._start = time.monotonic()
        header = RecordingHeader(os.getpid(), time.time_ns(), options.share)
        self._files = RecordFiles(options, header)
        self._log = log
        self._written = self._dropped = self._bytes = 0
        self._queue: list[tuple[bytes, bytes]] = []
        self._held = 0
        self._ended = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failing = False
        self._retry_at = self._silent_until = float("-inf")

    def counts(self) -> Mapping[str, int]:
        """How many records were ``written`` and ``dropped`` so far, and the ``bytes`` of the former."""
        with self._changed:
            return {"written": self._written, "dropped": self._dropped, "bytes": self._bytes}

    def draws(self) -> bool:
        """Whether the next call is one of the share."""
        return random.random() < self._share  # noqa: S311 - not a secret

    def put(self, arrival: float, call: RecordedCall) -> None:
        """Record ``call``, which arrived at ``arrival``, seconds of ``time.monotonic``; its own time is replaced."""
        call = RecordedCall(
            max(0, round((arrival - self._start) * 1e9)),
            call.method,
            call.protocol,
            call.model,
            call.version,
            call.request_id,
            call.message,
        )
        head = record_head(call)
        size = len(head) + len(call.message)
        with self._changed:
            full = len(self._queue) >= MAX_RECORDS or self._held + size > MAX_BYTES
            if not head or self._ended or full:
                self._dropped += 1
                return
            self._queue.append((head, call.message))
            self._held += size
            if self._thread is None:
                self._thread = NamedThread(target=self._run, name="recorder", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Take no more records; wait at most a second until those that wait are written."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_FLUSH_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._ended:
                        self._files.close()
                        return
                    self._changed.wait()
                enough = lambda: self._ended or self._held > MAX_BYTES // 2  # noqa: E731 - it is one line
                self._changed.wait_for(enough, _GATHER_S)
                taken, self._queue = self._queue, []
            self._write(taken)
            with self._changed:
                self._held -= sum(len(head) + len(message) for head, message in taken)

    def _write(self, taken: list[tuple[bytes, bytes]]) -> None:
        most = min(_CHUNK_BYTES, self._files.room)
        chunk: list[bytes] = []
        size = 0
        for head, message in taken:
            record = sealed_record(head, message)
            if len(record) > self._files.room:
                self._drop(1)
                continue
            if chunk and size + len(record) > most:
                self._write_chunk(chunk)
                chunk, size = [], 0
            chunk.append(record)
            size += len(record)
        if chunk:
            self._write_chunk(chunk)

    def _write_chunk(self, records: list[bytes]) -> None:
        now = time.monotonic()
        if now < self._retry_at:
            self._drop(len(records))
            return
        content = b"".join(records)
        try:
            self._files.write(content)
        except OSError as error:
            self._drop(len(records))
            self._failing, self._retry_at = True, now + _PAUSE_S
            if now >= self._silent_until:
                self._silent_until = now + _SILENCE_S
                self._log.warning("records_not_written", error=str(error))
            return
        with self._changed:
            self._written += len(records)
            self._bytes += len(content)
        if self._failing:
            self._failing = False
            self._log.info("records_written_again")

    def _drop(self, records: int) -> None:
        with self._changed:
            self._dropped += records
