"""Worker processes that keep order, hold a bounded amount of work, and never outlive their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import connection
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


def map_in_order(
    function: Callable[[Task], Result], tasks: Iterable[Task], *, workers: int
) -> Iterator[tuple[Task, Result]]:
    """Each task with its result, in the order of ``tasks``.

    With ``workers`` below 2 the work is done here, as the iterator is read.  Otherwise by that
    many spawned processes, with at most ``2 * workers`` tasks begun or waiting to be read;
    ``function``, tasks and results are pickled.  Closing the iterator ends the processes.  An
    error in ``function`` or ``tasks`` is raised here.
    """
    if workers < 2:
        for task in tasks:
            yield task, function(task)
        return
    pool = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_tie_to_parent
    )
    under_way: deque[tuple[Task, Future[Result]]] = deque()
    try:
        for task in tasks:
            under_way.append((task, pool.submit(function, task)))
            if len(under_way) == 2 * workers:
                first, future = under_way.popleft()
                yield first, future.result()
        while under_way:
            first, future = under_way.popleft()
            yield first, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _tie_to_parent() -> None:
    """Leave Ctrl-C to the parent, and end as soon as the parent has, however it ended.

    A pool's workers hold both ends of their queue, so without this they would wait forever
    for a parent that was killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="tessera-parent-watch", daemon=True).start()
