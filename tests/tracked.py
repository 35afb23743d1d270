"""The files that git holds, for tests that look at all of them."""

import functools
import subprocess

import pytest

from tests import REPOSITORY


@functools.cache
def tracked_files():
    """Paths relative to the repository, links included; the test is skipped outside a checkout."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("this is not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout
    names = [name for name in listed.split("\0") if name]
    # A file that was deleted and not yet committed is listed too.
    return [
        name for name in names if (REPOSITORY / name).is_symlink() or (REPOSITORY / name).exists()
    ]
