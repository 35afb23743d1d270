"""The short form of `tests.attack.lives`, and what it says of calls and changes; the long form is in ``make attack``."""

from collections import Counter

import grpc
import pytest

from tessera.serving.protocol import predictor_pb2 as pb
from tests.attack import life_calls, lives
from tests.attack.certain import Call, Calls, Certain
from tests.attack.faults import BROKEN
from tests.conformance.conformance_harness import commands
from tests.patience import PATIENCE_S


@pytest.mark.parametrize("server", ["python", "cpp"])
def test_a_few_models_live_and_die(server, tmp_path, capsys):
    if server not in commands():
        pytest.skip("the C++ server is not built (make build)")
    flags = ["--calls", "2000", "--limit-s", str(PATIENCE_S), "--models", "4", "--clients", "1"]
    given = lives.parse(["--server", server, *flags, "--kill-every-s", "3"])
    assert lives.summary(given, lives.live(given, tmp_path)) == 0, capsys.readouterr().out


def summary_of(**ends):
    given = lives.parse(["--server", "cpp", "--calls", "10"])
    return lives.summary(given, Counter({life_calls.OK: 10, "load: done": 3, **ends}))


@pytest.mark.parametrize("end", [life_calls.LOST, life_calls.WRONG, BROKEN])
def test_a_promise_that_was_not_kept(end, capsys):
    assert summary_of() == 0
    assert summary_of(**{f"{end}: why": 1}) == 1
    assert "NOT kept: 1 bad" in capsys.readouterr().out
    assert summary_of(**{life_calls.OK: 9}) == 1


WORLD = life_calls.World(
    address="",
    contents={"m": {1: "a", 2: "b"}},
    requests=[b""],
    right={"a": [{"default": [0.25]}], "b": [{"default": [0.5]}]},
    steady=frozenset({"m"}),
)


@pytest.mark.parametrize(
    ("asked", "named", "score", "fault"),
    [
        ("", "1", 0.25, ""),
        ("stable", "2", 0.5, ""),
        ("2", "2", 0.5, ""),
        ("2", "1", 0.25, "version '2' of m was asked for and 1 answered"),
        ("", "2", 0.25, "the scores are not those of version 2 of m"),
        ("", "3", 0.25, "version '' of m was asked for and 3 answered"),
        ("", "stable", 0.25, "m answered as 'm' 'stable'"),
    ],
)
def test_an_answer_is_held_against_the_version_that_it_names(asked, named, score, fault):
    answer = pb.PredictionResponse(
        predictions={"default": pb.FloatVec(data=[score])}, model_name="m", model_version=named
    )
    assert WORLD.fault(0, "m", asked, answer.SerializeToString()) == fault


UNKNOWN = "model_version '1' of model 'm' is unknown;"


class Refused(grpc.RpcError):
    def __init__(self, code, why):
        self.code, self.details = lambda: grpc.StatusCode[code], lambda: why


@pytest.mark.parametrize(
    ("version", "code", "why", "end"),
    [
        ("", "UNAVAILABLE", "the server is draining", life_calls.AWAY),
        ("", "UNAVAILABLE", "Connection refused", life_calls.AWAY),
        ("1", "NOT_FOUND", f"{UNKNOWN} there is version '2'", life_calls.TOLD),
        (
            "1",
            "NOT_FOUND",
            f"{UNKNOWN} there is version '2', '3' and label 'stable'",
            life_calls.TOLD,
        ),
        ("1", "NOT_FOUND", f"{UNKNOWN} none is loaded", life_calls.TOLD),
        ("1", "NOT_FOUND", "model_name 'm' is unknown; this server has 'a', 'b'", life_calls.TOLD),
        ("1", "NOT_FOUND", f"{UNKNOWN} there is version '1', '2'", life_calls.WRONG),
        ("2", "NOT_FOUND", f"{UNKNOWN} there is version '1'", life_calls.WRONG),
        ("1", "NOT_FOUND", "model_name 'm' is unknown; this server has 'a', 'm'", life_calls.WRONG),
        ("1", "NOT_FOUND", "there is version '2'", life_calls.WRONG),
        ("1", "UNAVAILABLE", "version '1' of model 'm' is still loading", life_calls.BARE),
        ("stable", "UNAVAILABLE", "version '1' of model 'm' is still loading", life_calls.BARE),
        ("1", "UNAVAILABLE", "version '2' of model 'm' is still loading", life_calls.WRONG),
        ("1", "UNAVAILABLE", "version '1' of model 'a' is still loading", life_calls.WRONG),
        ("1", "UNAVAILABLE", "version '1' of model 'm' is being mended", life_calls.WRONG),
        ("1", "UNAVAILABLE", "no version of model 'm' is loaded", life_calls.WRONG),
        ("", "UNAVAILABLE", "no version of 'm' is there", f"{life_calls.REFUSED}: no version"),
        ("", "NOT_FOUND", "model_name 'm' is unknown", f"{life_calls.REFUSED}: model_name 'm'"),
        ("1", "INTERNAL", "bug", "LOST: INTERNAL bug"),
    ],
)
def test_only_what_may_be_refused_is(version, code, why, end):
    assert life_calls.ending(WORLD, "m", version, Refused(code, why)).startswith(end)


def held(*calls):
    """Version 1 of m is there from 10 to 20 and not from 30 to 40; it was ended at 50, before it was there again."""
    certain, all_calls = Certain(), Calls()
    certain.end("m", 5.0)
    certain.begin("m", [1], 10.0, there=True)
    certain.end("m", 20.0)
    certain.begin("m", [1, 2], 30.0, there=False)
    certain.end("m", 40.0)
    certain.begin("m", [1], 51.0, there=True)
    certain.end("m", 50.0)
    all_calls.add(
        Call(begin, end, "m", version, answered) for begin, end, version, answered in calls
    )
    return certain.faults(all_calls)


def test_calls_between_two_changes_are_held_to_what_is_certain():
    assert held((11.0, 12.0, 1, True), (31.0, 32.0, 1, False), (30.0, 40.0, 2, False)) == (3, {})
    assert held((9.0, 12.0, 1, False), (19.0, 21.0, 1, False), (25.0, 26.0, 1, True)) == (0, {})
    assert held((52.0, 53.0, 1, False), (11.0, 12.0, 2, False), (1.0, 2.0, 1, False)) == (0, {})
    assert held((11.0, 12.0, 1, False), (12.0, 13.0, 1, True)) == (
        2,
        {"version 1 of m was refused when it was loaded": 1},
    )
    assert held((31.0, 32.0, 2, True)) == (
        1,
        {"version 2 of m was answered when it was not loaded": 1},
    )
