"""Work on partitions of data: in this process, in processes over all cores, or on a Ray cluster.

Partitions are defined by the data alone, each gives one result, and results come back in the
partitions' order, so that what is made of them has the same bits whatever engine worked on how many
partitions at once.  A partition whose process ended is worked on again; nothing of it is lost, since
nothing of it was taken before its result was whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, Protocol, TypeVar

from tessera.cpus import usable_cpus
from tessera.errors import UserError

MAX_TRIES = 3
"""How often a partition is begun whose process ends without an answer."""

_PR_SET_PDEATHSIG = 1

Task = TypeVar("Task")
Result = TypeVar("Result")
TaskIn_contra = TypeVar("TaskIn_contra", contravariant=True)
ResultOut_co = TypeVar("ResultOut_co", covariant=True)


class Work(Protocol[TaskIn_contra, ResultOut_co]):
    """What is done to every partition.  Tasks and results are pickled; on a cluster the work is, too."""

    def start(self) -> Callable[[TaskIn_contra], ResultOut_co]:
        """Prepare a process, and return the function of one task.

        The local engine calls this once, before it forks: what it loads is shared by all processes as
        long as nobody writes to it.  On a cluster every process calls it.
        """
        ...


@dataclass(frozen=True)
class EachTask(Generic[Task, Result]):
    """The `Work` that is a function and needs nothing prepared.

    Attributes:
        function: of one task; on a cluster it is a module's, by name.
    """

    function: Callable[[Task], Result]

    def start(self) -> Callable[[Task], Result]:
        """See `Work.start`."""
        return self.function


class Engine(Protocol):
    """Where partitions are worked on."""

    def map(self, work: Work[Task, Result], tasks: Iterable[Task]) -> Iterator[tuple[Task, Result]]:
        """Each task with its result, in the order of ``tasks``; few are held at a time.

        Closing the iterator ends the processes.  An error of the work is raised here.

        Raises:
            UserError: the process of a task ended `MAX_TRIES` times, or the cluster cannot be used.
        """
        ...


def died(task: object, how: str) -> UserError:
    """The error of a partition whose process ended too often."""
    return UserError(
        f"the process that worked on {task} ended {MAX_TRIES} times ({how}); if memory was short, ask"
        " for fewer processes or smaller batches"
    )


class LocalEngine:
    """Processes of this machine, forked from this one; see `Engine`.

    Args:
        processes: how many; None: one per core.  With one, or for a single task, the work is done
            in this process.
    """

    def __init__(self, *, processes: int | None = None) -> None:
        self.processes = usable_cpus() if processes is None else processes

    def map(self, work: Work[Task, Result], tasks: Iterable[Task]) -> Iterator[tuple[Task, Result]]:
        """See `Engine.map`; at most ``2 * processes`` tasks are begun and not yet read."""
        source = iter(tasks)
        if self.processes < 2:
            run = None
            for task in source:
                run = run or work.start()
                yield task, run(task)
            return
        first = [task for _, task in zip(range(2), source, strict=False)]
        if not first:
            return
        run = work.start()
        if len(first) == 1:
            yield first[0], run(first[0])
            return
        with contextlib.closing(_Crew(run, self.processes)) as crew:
            yield from crew.map(_chained(first, source))


def _chained(first: list[Task], rest: Iterator[Task]) -> Iterator[Task]:
    yield from first
    yield from rest


@dataclass(eq=False)
class _Worker:
    """A forked process, and the task that it works on."""

    pid: int
    pipe: Connection
    number: int | None = None


class _Crew:
    """Forked processes that work on tasks; this process has no thread for them, so that it can fork."""

    def __init__(self, run: Callable[[Any], Any], processes: int) -> None:
        self._run = run
        self._processes = processes
        self._workers: list[_Worker] = []
        self._tasks: dict[int, Any] = {}
        self._tries: dict[int, int] = {}
        self._again: deque[int] = deque()

    def map(self, tasks: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        results: dict[int, Any] = {}
        begun = read = 0
        exhausted = False
        while True:
            while not exhausted and len(self._tasks) - len(results) < self._processes:
                if begun - read >= 2 * self._processes:
                    break
                try:
                    self._tasks[begun] = next(tasks)
                except StopIteration:
                    exhausted = True
                    break
                self._again.append(begun)
                begun += 1
            while self._again:
                self._give(self._again.popleft())
            if read in results:
                yield self._tasks.pop(read), results.pop(read)
                self._tries.pop(read, None)
                read += 1
            elif exhausted and read == begun:
                return
            else:
                results.update(self._answers())

    def _give(self, number: int) -> None:
        """Send a task to an idle process, which is begun where there is none."""
        message = pickle.dumps(self._tasks[number], protocol=pickle.HIGHEST_PROTOCOL)
        while True:
            worker = next((own for own in self._workers if own.number is None), None)
            worker = self._fork() if worker is None else worker
            try:
                worker.pipe.send_bytes(message)
            except (BrokenPipeError, ConnectionResetError):
                worker.number = number
                self._lost(worker)
                continue
            worker.number = number
            return

    def _answers(self) -> Iterator[tuple[int, Any]]:
        """Wait for processes that are done; their tasks' numbers and results."""
        busy = {worker.pipe: worker for worker in self._workers if worker.number is not None}
        for pipe in wait(list(busy)):
            worker = busy[pipe]  # type: ignore[index] # it is one of them
            number = worker.number
            assert number is not None
            try:
                done, value = pickle.loads(worker.pipe.recv_bytes())  # noqa: S301 - from our own child
            except (EOFError, ConnectionResetError, pickle.UnpicklingError):
                self._lost(worker)
                self._again.append(number)
                continue
            worker.number = None
            if not done:
                raise value
            yield number, value

    def _lost(self, worker: _Worker) -> None:
        """Take note that a process has ended; raises where its task has been tried often enough."""
        self._workers.remove(worker)
        worker.pipe.close()
        _, status = os.waitpid(worker.pid, 0)
        number = worker.number
        assert number is not None
        self._tries[number] = self._tries.get(number, 0) + 1
        if self._tries[number] >= MAX_TRIES:
            code = os.waitstatus_to_exitcode(status)
            how = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
            raise died(self._tasks[number], how)

    def _fork(self) -> _Worker:
        ours, theirs = multiprocessing.Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        # A collection writes to the objects that it looks at, which would then be shared no longer.
        gc.freeze()
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            try:
                for other in [ours, *(worker.pipe for worker in self._workers)]:
                    other.close()
                _live(self._run, theirs, parent)
            finally:
                os._exit(1)  # what called fork must not go on in this process
        gc.unfreeze()
        theirs.close()
        worker = _Worker(pid, ours)
        self._workers.append(worker)
        return worker

    def close(self) -> None:
        """End the processes, whatever they do."""
        for worker in self._workers:
            worker.pipe.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)
        self._workers = []


def _live(run: Callable[[Any], Any], pipe: Connection, parent: int) -> None:
    """The life of a forked process: answer tasks until the parent hangs up; Ctrl-C is the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(AttributeError, OSError):  # Linux alone has it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    while os.getppid() == parent:
        try:
            task = pickle.loads(pipe.recv_bytes())  # noqa: S301 - from our own parent
        except EOFError:
            os._exit(0)
        pipe.send_bytes(_answer(run, task))


def _answer(run: Callable[[Any], Any], task: object) -> bytes:
    try:
        return pickle.dumps((True, run(task)), protocol=pickle.HIGHEST_PROTOCOL)
    except UserError as error:
        return pickle.dumps((False, UserError(str(error))))
    except BaseException:  # noqa: BLE001 - it is raised in the parent
        text = f"a process failed at {task}:\n{traceback.format_exc()}"
        return pickle.dumps((False, RuntimeError(text)))
