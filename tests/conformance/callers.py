"""Calls that go on while versions or commits change."""

import threading
from collections import Counter

from tests.conformance.live_models import bits

# Leaves the server some of two cores to load with.
BETWEEN_CALLS_S = 0.002


class Callers:
    """Threads that call a model until they are told to end, and keep what is not the answer that is expected.

    ``named(response)`` is the version or the commit that an answer names; ``expected`` holds, by message and by that,
    the bits of the answer; ``pause_s`` is between two calls of a thread.
    """

    def __init__(self, server, messages, expected, named, *, threads=4, pause_s=BETWEEN_CALLS_S):
        self._pause_s = pause_s
        self._named = named
        self.answered = Counter()
        self.wrong = []
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._call, args=(server, messages, expected, first))
            for first in range(threads)
        ]

    def _call(self, server, messages, expected, turn):
        while not self._end.wait(self._pause_s):
            turn = (turn + 1) % len(messages)
            found = None
            try:
                response = server.predict(messages[turn])
                found = self._named(response)
                right = bits(response) == expected[turn][found]
            except Exception as error:  # noqa: BLE001 - the test shows whatever it was
                found, right = repr(error), False
            with self._lock:
                self.answered[found] += 1
                if not right:
                    self.wrong.append((turn, found))

    def count(self):
        """How many calls have ended."""
        with self._lock:
            return self.answered.total()

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        for thread in self._threads:
            thread.join()


def version_of(response):
    return int(response.model_version)


def commit_of(response):
    return response.model_commit
