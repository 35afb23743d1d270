"""The short form of `tests.attack.log_lives`; the long form is ``make attack-log-lives``."""

from tests.attack.log_lives import LogLives
from tests.attack.logs import summary
from tests.conformance.conformance_harness import commands


def test_a_few_kills(tmp_path, capsys):
    # One server, the one that starts sooner.
    lives = LogLives(tmp_path, [min(commands())], seed=1)
    lives.run(3, check_every=3)
    assert summary(lives.ends) == 0, capsys.readouterr().out
    assert lives.ends["checks"] == 1
    assert sum(count for end, count in lives.ends.items() if end.startswith("kills")) >= 3
    assert lives.ends["commits"] > 15
    assert lives.ends["answers"] > 0
