"""The table of cases that both servers' tests read: names, the fence, what comes next, what is refused."""

import json
from pathlib import Path

import pytest

from tessera.serving.commits.chain import (
    Fence,
    LogState,
    Step,
    StepKind,
    commit_name,
    next_step,
    parse_commit_name,
    refusal,
)
from tessera.serving.commits.fence import parse_fence, read_fence, write_fence
from tessera.serving.package.commit import COMMIT_FORMAT_VERSION, REFUSALS, Commit
from tessera.serving.package.manifest import GoldenInfo

CASES = json.loads((Path(__file__).parent / "cases.json").read_text(encoding="utf-8"))


def named(table):
    return pytest.mark.parametrize("case", CASES[table], ids=[one["name"] for one in CASES[table]])


def test_names():
    for name, number in CASES["names"]["valid"].items():
        assert parse_commit_name(name) == number
        assert commit_name(number) == name
    assert [n for n in CASES["names"]["invalid"] if parse_commit_name(n) is not None] == []


def test_fences():
    for case in CASES["fence"]["valid"]:
        expected = {int(number): sha256 for number, sha256 in case["commits"].items()}
        assert parse_fence(case["text"].encode()).commits == expected
    for text in CASES["fence"]["invalid"]:
        with pytest.raises(ValueError, match=r"\w"):
            parse_fence(text.encode())


@named("next")
def test_next(case):
    fence = Fence(dict.fromkeys(case["fence"], ""))
    step = next_step(case["names"], fence, case["applied"])
    assert step == Step(StepKind(case["step"]), case["number"])


@named("refusal")
def test_refusal(case):
    given = dict(case["commit"])
    sha256 = given.pop("sha256")
    commit = Commit(
        format_version=COMMIT_FORMAT_VERSION,
        newest_example_s=None,
        created_s=0.0,
        step=None,
        patches=(),
        golden=GoldenInfo(samples=0, atol=0.0, rtol=0.0),
        records={},
        **given,
    )
    fence = Fence({int(number): hashed for number, hashed in case["fence"].items()})
    found = refusal(
        commit, sha256, named=case["named"], state=LogState(**case["state"]), fence=fence
    )
    assert (None if found is None else found[0]) == case["refusal"]
    assert case["refusal"] in {None, *REFUSALS}


def test_a_fence_grows_and_keeps_what_it_knows(tmp_path):
    assert read_fence(tmp_path).commits == {}
    write_fence(tmp_path, {4: "", 3: "a" * 64})
    fence = write_fence(tmp_path, {3: "", 7: "b" * 64})
    assert fence.commits == {3: "a" * 64, 4: "", 7: "b" * 64} == read_fence(tmp_path).commits
    assert [path.name for path in tmp_path.iterdir()] == ["fenced.json"]
