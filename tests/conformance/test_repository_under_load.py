"""Versions that come and go under load: no call fails, and each answer has the bits of the version it names."""

from tests.conformance.callers import Callers, version_of
from tests.conformance.live_models import Models, asking, load, ready, serve, unload

ROUNDS = 12
VERSIONS = {1: "a", 2: "b", 3: "c"}


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
    with (
        serve(kind, models, "explicit") as running,
        Callers(running, messages, expected, version_of) as calls,
    ):
        for version in (2, 3):
            models.put("m", version, VERSIONS[version])
        for turn in range(ROUNDS):
            version = 1 + turn % 3
            load(running, "m", version=version, label="stable")
            seen = calls.answered[version]
            running.wait_for(lambda v=version, s=seen: calls.answered[v] > s + 5)
            for other in set(VERSIONS) - {version}:
                unload(running, "m", version=other)
            running.wait_for(lambda v=version: ready(running, "m") == {v})
    assert calls.wrong == []
    assert set(calls.answered) == {1, 2, 3}
