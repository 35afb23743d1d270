"""What both servers do where no flag says otherwise, as their help tells it."""

import re
import subprocess

import pytest

from tests.conformance.conformance_harness import REPOSITORY, commands

KUBERNETES_GRACE_S = 30
"""terminationGracePeriodSeconds of a pod that does not say another."""


@pytest.fixture(scope="module")
def default(kind):
    """The default that a server's help tells of a flag."""
    command = [*commands()[kind], "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)

    def find(flag):
        pattern = rf"^  {flag} .*?\(default:\s+([^\s);,]+)"
        return re.search(pattern, told.stdout, re.MULTILINE | re.DOTALL)[1]

    return find


def test_the_drain_ends_before_kubernetes_ends_the_server(default):
    """With what a process takes to end after its drain."""
    assert float(default("--drain-propagation-ms")) / 1e3 < float(default("--drain-limit-s"))
    assert float(default("--drain-limit-s")) + 3 < KUBERNETES_GRACE_S


def test_only_this_machine_is_listened_to(default):
    assert default("--host") == "127.0.0.1"
