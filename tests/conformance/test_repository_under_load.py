"""Versions that come and go under load: no call fails, and each answer has the bits of the version it names."""

import threading
from collections import Counter

from tests.conformance.live_models import Models, asking, bits, load, ready, serve, unload

ROUNDS = 12
VERSIONS = {1: "a", 2: "b", 3: "c"}


class Callers:
    """Threads that call a model until they are told to end, and keep what does not fit."""

    def __init__(self, server, messages, expected):
        self.answered = Counter()
        self.wrong = []
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._call, args=(server, messages, expected, first))
            for first in range(4)
        ]

    def _call(self, server, messages, expected, turn):
        while not self._end.is_set():
            turn = (turn + 1) % len(messages)
            found = ""
            try:
                response = server.predict(messages[turn])
                found = response.model_version
                right = bits(response) == expected[turn][int(found)]
            except Exception as error:  # noqa: BLE001 - the test shows whatever it was
                found, right = repr(error), False
            with self._lock:
                self.answered[found] += 1
                if not right:
                    self.wrong.append((turn, found))

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        for thread in self._threads:
            thread.join()


def test_swaps_under_load_fail_no_call_and_mix_no_answers(
    kind, tmp_path, variants, answers, drawn_live
):
    models = Models(tmp_path / "models", variants)
    models.put("m", 1, "a")
    messages = [asking(drawn_live.samples(size), "m") for size in (1, 1, 2, 7, 40)]
    expected = [
        {version: answers(name, message).tobytes() for version, name in VERSIONS.items()}
        for message in messages
    ]
    with serve(kind, models, "explicit") as running, Callers(running, messages, expected) as calls:
        for version in (2, 3):
            models.put("m", version, VERSIONS[version])
        for turn in range(ROUNDS):
            version = 1 + turn % 3
            load(running, "m", version=version, label="stable")
            seen = calls.answered[str(version)]
            running.wait_for(lambda v=str(version), s=seen: calls.answered[v] > s + 5)
            for other in set(VERSIONS) - {version}:
                unload(running, "m", version=other)
            running.wait_for(lambda v=version: ready(running, "m") == {v})
    assert calls.wrong == []
    assert set(calls.answered) == {"1", "2", "3"}
