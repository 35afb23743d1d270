"""Log lines leave the process on a thread of their own, so that a log can hold nothing up.

Whoever logs puts a line into a bounded queue and goes on.  A pipe that nobody reads, a full disk or
a reader that has gone away cost lines, which are counted, and nothing else.
"""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from collections import deque
from types import TracebackType

from tessera.serving.server.named_thread import NamedThread

MAX_LINES = 8_192
MAX_BYTES = 4 * 1024 * 1024
FLUSH_SECONDS = 1.0
"""How long `LogWriter.close` waits for lines that have not been written yet."""


class LogWriter(io.TextIOBase):
    """A text stream whose ``write`` never blocks and never fails; may be used by several threads.

    Args:
        descriptor: where the lines go; it stays open and belongs to the caller.  -1: nowhere, every
            line is dropped.
        max_lines: lines that may wait.
        max_bytes: bytes of UTF-8 that may wait.
        name: of the thread that writes.

    Attributes:
        dropped: lines that found the queue full or that the system refused to write.
    """

    def __init__(
        self,
        descriptor: int,
        *,
        max_lines: int = MAX_LINES,
        max_bytes: int = MAX_BYTES,
        name: str = "log",
    ) -> None:
        super().__init__()
        self.dropped = 0
        self._descriptor = descriptor
        self._name = name
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._begun = ""  # a line whose end has not come yet
        self._ended = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @classmethod
    def of_stderr(cls) -> LogWriter:
        """A writer of lines to the process's stderr, which may be closed."""
        return cls(-1 if sys.__stderr__ is None else sys.__stderr__.fileno())

    def writable(self) -> bool:
        """Always true."""
        return True

    def write(self, text: str) -> int:
        """Queue the lines that ``text`` ends; the rest waits for its end."""
        with self._changed:
            *lines, self._begun = (self._begun + text).split("\n")
            for line in lines:
                self._put(f"{line}\n".encode(errors="backslashreplace"))
            if len(self._begun) > self._max_bytes:
                self._begun = ""
                self.dropped += 1
            self._changed.notify_all()
        return len(text)

    def _put(self, line: bytes) -> None:
        full = len(self._lines) >= self._max_lines
        if self._ended or full or self._waiting_bytes + len(line) > self._max_bytes:
            self.dropped += 1
            return
        self._lines.append(line)
        self._waiting_bytes += len(line)
        if self._thread is None:
            self._thread = NamedThread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def end(self, timeout_s: float = FLUSH_SECONDS) -> bool:
        """Take no more lines; wait at most ``timeout_s`` seconds until those that wait are written.

        Returns:
            Whether they are, and nobody writes to the descriptor any more.
        """
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def __enter__(self) -> LogWriter:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._lines:
                    if self._ended:
                        return
                    self._changed.wait()
                line = self._lines.popleft()
            try:
                _write_all(self._descriptor, line)
            except OSError:
                with self._changed:
                    self.dropped += 1
            with self._changed:
                # Only now: a line that is being written is still held.
                self._waiting_bytes -= len(line)


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # noqa: PERF203 - somebody has made the pipe non-blocking
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
