"""The table of cases that both servers' unit tests read: names, wanted versions, choice, draw, plan.

A file's fingerprint is a number there, and a clock's time a number of seconds.
"""

import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
import xxhash

from tessera.serving.repository.choice import NoVersionError, Routes, draw
from tessera.serving.repository.control import parse_control
from tessera.serving.repository.folder import Fingerprint
from tessera.serving.repository.names import is_label, is_model_name, parse_version
from tessera.serving.repository.plan import VersionStatus, back_off_s, plan_model
from tessera.serving.repository.settings import parse_settings
from tessera.serving.repository.wanted import Wanted, wanted_versions

CASES = json.loads((Path(__file__).parent / "cases.json").read_text(encoding="utf-8"))


def named(table):
    return pytest.mark.parametrize("case", CASES[table], ids=[one["name"] for one in CASES[table]])


def file(number):
    return None if number is None else Fingerprint(0, number, 0, 0)


def wanted_of(case, present):
    settings = parse_settings(case["serving"].encode(), "serving.yaml")
    control = parse_control(json.dumps(case["control"]).encode(), "control.json")
    return wanted_versions(present, settings, control)


@pytest.mark.parametrize("case", CASES["draw"], ids=[one["key"][:20] for one in CASES["draw"]])
def test_draw(case):
    key = case["key"].encode()
    hashed = xxhash.xxh64(case["model"].encode() + b"\0" + key, seed=0).intdigest()
    assert draw(case["model"], key) == case["answer"] == float(Fraction(hashed, 1 << 64))
    assert draw(case["model"], key, b"\0shadow") == case["shadow"]


def test_draws_fill_the_shares_evenly():
    drawn = [draw("ranker", b"user-%d" % user) for user in range(20_000)]
    # Four standard deviations of a share of a quarter.
    assert abs(sum(point < 0.25 for point in drawn) - 5_000) < 4 * math.sqrt(20_000 * 0.25 * 0.75)


def test_back_off():
    assert [[failures, back_off_s(failures)] for failures, _ in CASES["back_off_s"]] == CASES[
        "back_off_s"
    ]


@pytest.mark.parametrize(
    ("table", "accepts"),
    [
        ("versions", lambda text: parse_version(text) == int(text)),
        ("labels", is_label),
        ("model_names", is_model_name),
    ],
)
def test_names(table, accepts):
    assert [text for text in CASES[table]["valid"] if not accepts(text)] == []
    refuses = (lambda text: parse_version(text) is None) if table == "versions" else None
    refused = refuses or (lambda text: not accepts(text))
    assert [text for text in CASES[table]["invalid"] if not refused(text)] == []


@named("wanted")
def test_wanted(case):
    wanted = wanted_of(case, case["present"])
    assert sorted(wanted.versions) == case["wanted"]
    assert wanted.labels == case["labels"]
    assert wanted.may_be_none is case.get("may_be_none", False)


@named("choice")
def test_choice(case):
    not_ready = {int(version): why for version, why in case["not_ready"].items()}
    ready = frozenset(case["ready"])
    routes = Routes("ranker", ready, not_ready, wanted_of(case, ready))
    if "answer" in case:
        assert routes.choose(case["asked"], case["key"].encode) == case["answer"]
        return
    with pytest.raises(NoVersionError) as failure:
        routes.choose(case["asked"], case["key"].encode)
    assert failure.value.refusal.value == case["refusal"]
    assert failure.value.message == case["message"]


@pytest.mark.parametrize("case", CASES["shadow"])
def test_shadow(case):
    settings = f"shadow: {{version: 4, share: {case['percent']}}}"
    wanted = wanted_of({"serving": settings, "control": {}}, [3, 4])
    routes = Routes("ranker", frozenset({3, 4} if case["ready"] else {3}), {}, wanted)
    assert routes.shadow(case["key"].encode) == case["shadow"]


@named("plan")
def test_plan(case):
    states = {
        int(version): VersionStatus(
            file=file(state.get("file")),
            failed_file=file(state.get("failed_file")),
            failures=state.get("failures", 0),
            failed_at=state.get("failed_at", 0),
            dropped=state.get("dropped", False),
        )
        for version, state in case["states"].items()
    }
    plan = plan_model(
        Wanted(
            versions=frozenset(case["wanted"]),
            labels=case["labels"],
            may_be_none=case["may_be_none"],
        ),
        {int(version): file(number) for version, number in case["present"].items()},
        states,
        retry=case["retry"],
        now=case["now"],
    )
    assert plan.load == case["load"]
    assert sorted(plan.retire) == case["retire"]
    assert plan.again == (math.inf if case["again"] is None else case["again"])
