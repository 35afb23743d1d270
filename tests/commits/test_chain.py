"""The table of cases that both servers' tests read: names, the fence, what comes next, what is refused."""

import fcntl
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tessera.errors import UserError
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
from tessera.serving.server.follow.log_listing import LogListing

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
    assert {path.name for path in tmp_path.iterdir()} == {"fenced.json", ".fenced.lock"}


def test_nobody_who_adds_to_a_fence_loses_the_entries_of_another(tmp_path):
    def add(writer):
        for number in range(25 * writer + 1, 25 * writer + 26):
            write_fence(tmp_path, {number: ""})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    assert read_fence(tmp_path).commits.keys() == set(range(1, 101))


def test_a_fence_that_another_process_holds_for_long_is_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr("tessera.serving.commits.fence._PATIENCE_S", 0.02)
    with (tmp_path / ".fenced.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=r"another process has held this lock for 0\.02 s"):
            write_fence(tmp_path, {1: ""})
    assert write_fence(tmp_path, {1: ""}).commits == {1: ""}


def test_the_folder_is_listed_seldom_where_that_takes_long(tmp_path):
    seconds = itertools.count()
    listing = LogListing(tmp_path, clock=lambda: float(next(seconds)))  # each listing takes one

    def put(number):
        (tmp_path / commit_name(number)).touch()

    assert LogListing(tmp_path / "none").names_from(1) == []
    put(1)
    put(3)
    assert listing.names_from(1) == [commit_name(1)]
    assert listing.names_from(2) == [commit_name(3)]  # this one has listed the folder
    put(4)
    assert listing.names_from(2) == [commit_name(3)]
    put(2)
    assert listing.names_from(2) == [commit_name(2)]
    (tmp_path / commit_name(2)).unlink()
    for _ in range(100):
        next(seconds)
    assert sorted(listing.names_from(2)) == [commit_name(3), commit_name(4)]


def test_a_listing_that_stood_still_does_not_put_off_the_next_one_for_long(tmp_path):
    looks = iter([0.0, 600.0, 629.0, 630.0, 630.0, 630.0])  # the first listing takes ten minutes
    listing = LogListing(tmp_path, clock=lambda: next(looks))
    assert listing.names_from(1) == []
    (tmp_path / commit_name(2)).touch()
    assert listing.names_from(1) == []
    assert listing.names_from(1) == [commit_name(2)]
