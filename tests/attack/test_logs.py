"""The short form of `tests.attack.logs`; the long form is ``make attack-logs``."""

from collections import Counter

import pytest

from tests.attack import logs
from tests.conformance.conformance_harness import commands


@pytest.mark.parametrize("server", ["python", "cpp"])
def test_a_few_faulted_logs(server, tmp_path, capsys):
    if server not in commands():
        pytest.skip("the C++ server is not built (make build)")
    given = logs.parse(
        ["--server", server, "--faults", "6", "--kill-every", "3", "--commits", "12"]
    )
    ends = logs.attack(given, tmp_path)
    assert logs.summary(ends) == 0, capsys.readouterr().out
    assert ends["kills"] == 2
    assert ends["answers that were checked"] >= given.faults


def test_what_was_not_kept_is_told(capsys):
    assert logs.summary(Counter({"cut": 3, "NOT KEPT: wrong answers": 0})) == 0
    assert logs.summary(Counter({"cut": 3, "NOT KEPT: wrong answers": 1})) == 1
    assert "NOT KEPT: wrong answers" in capsys.readouterr().out
