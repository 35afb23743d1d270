"""Servers on addresses of their own and one port, the name that leads to them, and clients that ask all the while."""

import socket
import threading
import time
from collections import Counter
from contextlib import ExitStack

from tessera.serving.client import PredictError, PredictorClient, RequestDrawer, read_schema
from tests.conformance.conformance_harness import RunningServer, same_bits
from tests.package_factory import make_package
from tests.patience import PATIENCE_S
from tests.rolling.name_server import NameServer

SAMPLES = 4
BETWEEN_CALLS_S = 0.002
HOST = "127.0.0.{}"
"""Loopback addresses, as Pods have one each; the first is 127.0.0.11."""


def free_port(hosts):
    """A port that no program has on any of ``hosts``."""
    while True:
        with ExitStack() as stack:
            port = 0
            try:
                for host in hosts:
                    held = stack.enter_context(socket.socket())
                    held.bind((host, port))
                    port = held.getsockname()[1]
            except OSError:
                continue
            return port


class Fleet:
    """Servers by number, and the name whose addresses are those that are ready.

    Each serves the same model under a version of its own, so that an answer tells who gave it.
    """

    def __init__(self, kind, folder, numbers, *flags):
        self.packages = {
            number: make_package(folder, name="ranker", version=str(number))[0]
            for number in numbers
        }
        self._kind, self._flags = kind, flags
        self._hosts = {number: HOST.format(10 + number) for number in numbers}
        self.port = free_port(self._hosts.values())
        self.names = NameServer()
        self._running = {}

    def start(self, *numbers):
        """Start servers together; the name leads to each once it is ready."""
        for number in numbers:
            flags = ("--model", self.packages[number], *self._flags)
            self._running[number] = RunningServer(
                self._kind, *flags, host=self._hosts[number], port=self.port
            )
        for number in numbers:
            self._running[number].__enter__()
        self._tell()

    def begin_stop(self, number):
        """SIGTERM: the server is not ready from then on, and the name no longer leads to it."""
        server = self._running.pop(number)
        server.signal()
        self._tell()
        return server

    def restart(self, number):
        """Stop one and start it again; its exit status."""
        server = self.begin_stop(number)
        status = server.exit_status()
        server.__exit__(None, None, None)
        self.start(number)
        return status

    def fair(self, shares):
        """Whether each running server's share is within a tenth of an equal one."""
        equal = 1 / len(self._running)
        return all(abs(shares.get(number, 0) / equal - 1) <= 0.1 for number in self._running)

    def _tell(self):
        self.names.set(self._hosts[number] for number in sorted(self._running))

    def __enter__(self):
        self.names.__enter__()
        return self

    def __exit__(self, *_):
        for server in self._running.values():
            server.__exit__(None, None, None)
        self.names.__exit__()


class Load:
    """Threads that ask by the fleet's name until the block ends.

    Attributes:
        answered: answers by the server's number.
        failed: what calls failed with, each with how often.
        wrong: answers whose bits are not those of the first one to the same request.
    """

    def __init__(self, fleet, *, threads=4, **options):
        schema = read_schema(next(iter(fleet.packages.values())))
        drawer = RequestDrawer(schema, seed=0)
        self._requests = [drawer.samples(SAMPLES) for _ in range(4)]
        self._client = PredictorClient(
            fleet.names.target(fleet.port), schema=schema, timeout_s=60, **options
        )
        self._first = {}
        self.answered, self.failed, self.wrong = Counter(), Counter(), 0
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(threads)]

    def _ask(self, turn):
        while not self._end.wait(BETWEEN_CALLS_S):
            turn = (turn + 1) % len(self._requests)
            try:
                answer = self._client.predict_arrays(self._requests[turn])
            except PredictError as error:
                with self._lock:
                    self.failed[str(error)] += 1
                continue
            scores = answer.outputs["default"]
            with self._lock:
                self.answered[int(answer.model_version)] += 1
                self.wrong += not same_bits(self._first.setdefault(turn, scores), scores)

    def shares(self, calls):
        """The share of each server of the next ``calls`` answers."""
        with self._lock:
            before = self.answered.copy()
        wait_until(lambda: self.answered.total() - before.total() >= calls)
        with self._lock:
            since = self.answered - before
        return {number: count / since.total() for number, count in since.items()}

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        for thread in self._threads:
            thread.join()
        self._client.close()


def wait_until(holds):
    """Ask again until other threads and processes got that far; the seconds that it took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < PATIENCE_S, "it never happened"
        time.sleep(0.005)
    return time.monotonic() - began
