"""Worker processes that keep order, hold a bounded amount of work, and never outlive their parent.

A worker is a Python of its own that runs `serve_parent` and is spoken to over its standard input and
output, one pickled task and result after the other.  Unlike `multiprocessing`'s it does not import
the main module again, so a caller's script needs no ``if __name__ == "__main__":`` for it; and since
the only other end of its input is its parent's, it ends with its parent, however that ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, TypeVar

from tessera.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")

# The child imports what its parent can import.
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    f" from {__name__} import serve_parent; serve_parent()"
)


def map_in_order(
    function: Callable[[Task], Result], tasks: Iterable[Task], *, workers: int
) -> Iterator[tuple[Task, Result]]:
    """Each task with its result, in the order of ``tasks``.

    With ``workers`` below 2 the work is done here, as the iterator is read.  Otherwise by that
    many processes, with at most ``2 * workers`` tasks begun or waiting to be read; ``function`` (of a
    module, by name), tasks and results are pickled.  Closing the iterator ends the processes.  An
    error in ``function`` or ``tasks`` is raised here.

    Raises:
        UserError: a process was killed.
    """
    if workers < 2:
        for task in tasks:
            yield task, function(task)
        return
    with contextlib.ExitStack() as stack:
        free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for _ in range(workers):
            worker = _Worker()
            stack.callback(worker.close)
            free.put(worker)

        def call(task: Task) -> Result:
            worker = free.get()
            try:
                result: Result = worker.call(function, task)
            finally:
                free.put(worker)
            return result

        # One thread per process; they are left before the processes are.
        pool = ThreadPoolExecutor(workers, thread_name_prefix="tessera-worker")
        stack.callback(pool.shutdown, cancel_futures=True)
        under_way: deque[tuple[Task, Future[Result]]] = deque()
        for task in tasks:
            under_way.append((task, pool.submit(call, task)))
            if len(under_way) == 2 * workers:
                first, future = under_way.popleft()
                yield first, future.result()
        while under_way:
            first, future = under_way.popleft()
            yield first, future.result()


class _Worker:
    """One process, which `close` ends."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def close(self) -> None:
        """Hang up and wait for its end; no call may be under way."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # which ends it
        self._process.wait()

    def call(self, function: Callable[[Any], Any], task: object) -> Any:
        """``function(task)``, done there; by one thread at a time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            _send(self._process.stdin, (function, task))
            done, value = pickle.load(self._process.stdout)  # noqa: S301 - from our own child
        except (BrokenPipeError, EOFError) as error:
            raise UserError(
                f"workers: process {self._process.pid} ended with status {self._process.wait()}"
                " before its work was done; if memory was short, ask for fewer workers"
            ) from error
        if not done:
            raise value
        return value


def _send(pipe: BinaryIO | Any, value: object) -> None:
    pickle.dump(value, pipe, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.flush()


def serve_parent() -> None:
    """The life of a worker: answer tasks until the parent hangs up; Ctrl-C is the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed by mistake must not get among the answers
    while True:
        try:
            function, task = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our own parent
        except EOFError:
            return
        try:
            answer = (True, function(task))
        except Exception as error:  # noqa: BLE001 - it is raised in the parent
            answer = (False, error)
        try:
            _send(answers, answer)
        except BrokenPipeError:
            return
