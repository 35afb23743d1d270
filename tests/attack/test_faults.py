"""What the long run under faults says of its calls; the run itself is in ``make attack``."""

from collections import Counter

import pytest

from tests.attack import calling
from tests.attack.faults import BROKEN, parse, summary


def status_of(**ends):
    given = parse(["--server", "cpp", "--calls", "10"])
    ends = {calling.OK: 10, "not accepted": 3, **ends}
    return summary(given, 1.0, Counter(restart=1), Counter(ends))


def test_a_promise_that_was_kept(capsys):
    assert status_of() == 0
    assert "0 lost, 0 wrong, 0 times broken, 10 of 10 answered" in capsys.readouterr().out


@pytest.mark.parametrize("end", [calling.LOST, calling.WRONG, BROKEN])
def test_a_promise_that_was_not_kept(end, capsys):
    assert status_of(**{f"{end}: why": 1}) == 1
    said = capsys.readouterr().out
    assert f"1  {end}: why" in said
    assert "NOT kept" in said


def test_too_few_calls():
    assert status_of(**{calling.OK: 9}) == 1


def test_answers_survive_the_file(tmp_path):
    answers = [(b"\x00\xff", {"default": [0.1, 0.25]})]
    calling.write_answers(tmp_path / "answers", answers)
    assert calling.read_answers(tmp_path / "answers") == answers


@pytest.mark.parametrize(
    ("details", "kind"),
    [
        ("the server is draining", "not accepted"),
        ("recvmsg:Connection refused", "not accepted"),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: Socket closed",
            "not accepted",
        ),
        ("Socket closed", "hung up"),
        ("recvmsg:Connection reset by peer", "hung up"),
        ("it rains", None),
    ],
)
def test_why_a_call_was_unavailable(details, kind):
    assert calling.kind_of_unavailable(details) == kind
