"""The engine of `tessera.partitions` on a Ray cluster.

Every partition is a task of Ray's, which runs where a core is free and runs again elsewhere when its
process or its node is lost, as often as `MAX_TRIES` says.  A worker process keeps what the work's
``start`` gave it, so that a package is loaded once per process.  Files are read where a task runs: the
nodes need the same paths.
"""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tessera.errors import UserError
from tessera.partitions import MAX_TRIES, Result, Task, Work, died

_CONNECT_S = 5.0

_started: dict[str, Callable[[Any], Any]] = {}
"""In a worker process: what the work that it was last given has started, by the work's key."""


class RayEngine:
    """Tasks on a Ray cluster; see `tessera.partitions.Engine`.

    Args:
        address: of a cluster that runs; None: one is begun on this machine and ended with the work, or
            the one that this process is connected to already is used.
        processes: how many tasks run at once; None: one per core of the cluster.

    Raises:
        UserError: ray is not installed.
    """

    def __init__(self, address: str | None, *, processes: int | None = None) -> None:
        try:
            import ray  # noqa: PLC0415 - only for those who have a cluster
        except ImportError as error:
            raise UserError(
                "the engine ray needs the package ray: pip install 'tessera-rec[ray]'"
            ) from error
        self._ray: Any = ray
        self._address = address
        self._processes = processes

    def map(self, work: Work[Task, Result], tasks: Iterable[Task]) -> Iterator[tuple[Task, Result]]:
        """See `tessera.partitions.Engine.map`; at most two tasks per core are begun and not yet read."""
        ray = self._ray
        with self._connected():
            at_once = self._processes or max(1, int(ray.cluster_resources().get("CPU", 1)))
            # A node's loss is not the task's fault, but the bound keeps one that kills nodes from going on.
            call = ray.remote(num_cpus=1, max_retries=MAX_TRIES - 1)(_call)
            key, shared = uuid.uuid4().hex, ray.put(work)
            under_way: deque[tuple[Task, Any]] = deque()
            for task in tasks:
                under_way.append((task, call.remote(key, shared, task)))
                if len(under_way) >= 2 * at_once:
                    yield self._read(*under_way.popleft())
            while under_way:
                yield self._read(*under_way.popleft())

    def _read(self, task: Task, reference: Any) -> tuple[Task, Any]:
        ray = self._ray
        try:
            return task, ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from error
            raise
        except (
            ray.exceptions.WorkerCrashedError,
            ray.exceptions.NodeDiedError,
            ray.exceptions.OutOfMemoryError,
            ray.exceptions.ObjectLostError,
        ) as error:
            raise died(task, type(error).__name__) from error

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        ray = self._ray
        if ray.is_initialized():
            yield
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self._address is not None:
            _refuse_silent(self._address)
        else:
            options |= {"num_cpus": self._processes, "include_dashboard": False}
        try:
            # "local" begins a cluster even where the environment names one.
            ray.init(address=self._address or "local", **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise _unusable(str(self._address), reason) from error
        try:
            yield
        finally:
            ray.shutdown()


def _refuse_silent(address: str) -> None:
    """Raise where nobody listens at ``HOST:PORT``; ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if "/" in address or not port.isdecimal():
        return  # "auto", or an address of another kind
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise _unusable(address, str(error)) from error


def _unusable(address: str, reason: str) -> UserError:
    return UserError(
        f"ray_address={address!r}: no Ray cluster can be used there ({reason}); begin one with"
        " 'ray start --head', or leave the address out"
    )


def _call(key: str, work: Work[Any, Any], task: Any) -> Any:
    """Run a task in a worker process of the cluster."""
    if key not in _started:
        _started.clear()
        _started[key] = work.start()
    return _started[key](task)
