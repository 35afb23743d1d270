"""token_cases.json: the file of tokens and what its limits allow, case by case.

cpp_server/tests/token_cases_test.cc holds the C++ server to the same table.
"""

import json
import os
from collections import deque
from pathlib import Path

import pytest

from tessera.errors import UserError
from tessera.serving.server.errors import Code, ServeError
from tessera.serving.server.metrics.security_metrics import SecurityMetrics
from tessera.serving.server.security.authorizer import Authorizer
from tessera.serving.server.security.file_watch import FileWatch
from tessera.serving.server.security.rates import Rates, next_full_until
from tessera.serving.server.security.token_file import parse_tokens, read_token_file

CASES = json.loads(Path(__file__).with_name("token_cases.json").read_text())


@pytest.mark.parametrize("case", CASES["files"], ids=lambda case: case["case"])
def test_a_file(case):
    if "error" in case:
        with pytest.raises(UserError) as refused:
            parse_tokens(case["content"])
        assert str(refused.value) == case["error"]
        return
    table = parse_tokens(case["content"])
    assert len(table) == len(case["tokens"])
    for token, name, rate in case["tokens"]:
        found = table.find(token)
        assert (found.name, found.calls_per_s) == (name, rate)
        assert token not in repr(found)
    assert table.find("other") is None


@pytest.mark.parametrize("case", CASES["rates"], ids=lambda case: case["case"])
def test_a_rate(case):
    # Whether its own memory or that of others' tokens is there changes nothing.
    rates = Rates()
    token = parse_tokens(f"abc shop {case['rate']}").find("abc")
    other = parse_tokens("abd shop 1").find("abd")
    full_until_ns, allowed = 0, []
    for at_ms in case["calls_ms"]:
        now_ns = (100 + at_ms) * 1_000_000
        after_ns = next_full_until(full_until_ns, now_ns, case["rate"])
        full_until_ns = full_until_ns if after_ns is None else after_ns
        allowed.append(int(after_ns is not None))
        assert rates.take(token, now_ns) is (after_ns is not None)
        rates.take(other, now_ns)
    assert allowed == case["allowed"]


def test_rates_are_of_all_processes_that_were_forked():
    rates = Rates()
    token = parse_tokens("abc shop 1").find("abc")
    assert token is not None
    child = os.fork()
    if child == 0:
        os._exit(0 if rates.take(token, 5) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not rates.take(token, 6)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "there is no such file"),
        (b"t\xc3\xb6ken", "has bytes that are not ASCII"),
        (b"abc\n*", "line 2 has no token"),
        (b"# " + b"x" * (1 << 20), "has more than 1048576 bytes"),
    ],
    ids=["none", "not ASCII", "line", "size"],
)
def test_a_file_that_cannot_be_read(tmp_path, content, expected):
    path = tmp_path / "tokens"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=expected) as refused:
        read_token_file(str(path))
    assert str(refused.value).startswith(f"{path}: ")


class Warnings:
    """A logger that keeps the names of warnings."""

    def __init__(self):
        self.events = []

    def warning(self, event, **_):
        self.events.append(event)


@pytest.fixture
def authorizer(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("abc shop 1\n")
    path.chmod(0o600)
    made = Authorizer(str(path), Rates(), SecurityMetrics(), Warnings(), own_token="own")
    made.path = path
    return made


@pytest.mark.parametrize(
    "header", [None, "", "abc", "Bearer", "Bearer ", "Basic abc", "Bearerabc"], ids=repr
)
def test_a_header_without_a_token(authorizer, header):
    with pytest.raises(ServeError, match="the call has no token") as refused:
        authorizer.admit(header)
    assert refused.value.code is Code.UNAUTHENTICATED


@pytest.mark.parametrize("header", ["Bearer abc", "bearer abc", "BEARER  abc ", "Bearer own"])
def test_a_header_with_one(authorizer, header):
    authorizer.admit(header)


def test_a_refusal_tells_no_token(authorizer):
    for given, code in (("abd", Code.UNAUTHENTICATED), ("abc", Code.RESOURCE_EXHAUSTED)):
        with pytest.raises(ServeError) as refused:
            deque((authorizer.admit(f"Bearer {given}") for _ in range(100)), maxlen=0)
        assert refused.value.code is code
        assert given not in refused.value.message


def test_a_file_that_others_may_read_is_warned_of(authorizer):
    assert authorizer._log.events == []
    authorizer.path.chmod(0o644)
    assert authorizer.read() == 1
    assert authorizer._log.events == ["secret_readable_by_others"]


def test_a_change_is_told_once_the_files_have_settled(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("1")
    watch = FileWatch([str(first), str(second)])
    assert not watch.changed()
    second.write_text("2")
    assert not watch.changed()
    first.write_text("three")
    assert not watch.changed()
    assert watch.changed()
    assert not watch.changed()
    second.unlink()
    watch.forget()
    assert not watch.changed()
