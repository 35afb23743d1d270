"""What must not be in git: paths of one machine, caches and built files."""

import re

import pytest

from tests import REPOSITORY
from tests.tracked import tracked_files

# An absolute path below a folder that every machine has and fills differently.  What stands before
# the slash tells it from a part of a relative path, of a URL or of a fraction.  KServe puts models into one of that name.
MACHINE_PATH = re.compile(
    rb"(?<![\w.~$})\]>/-])/(?:home|Users|root|work|farm|mnt(?!/models\b)|scratch|workspace|tmp|var/tmp)/[\w.-]"
)
BUILT = re.compile(
    r"(^|/)(__pycache__|build|dist|\.venv|node_modules|[^/]+\.(cache|egg-info))/"
    r"|(^|/)\.[a-z]+_cache/|\.(so|o|a|pyc|pyd|whl|pt|gcda|profraw)$"
)


@pytest.mark.parametrize(
    "text",
    ["at |home|somebody", '"|tmp|x.pt"', "=|root|.cache", "file:|mnt|disk", "(|var|tmp|a)"],
)
def test_a_machine_s_path_is_found(text):
    # Written with bars, as the test below reads this file too.
    assert MACHINE_PATH.search(text.replace("|", "/").encode())


@pytest.mark.parametrize(
    "text",
    [
        "docs/home/page",
        "https://example.org/home/page",
        "../work/x",
        "$TMP/work/x",
        "folder/ or /tmp",
        "/usr/include",
    ],
)
def test_other_text_is_not_taken_for_one(text):
    assert not MACHINE_PATH.search(text.encode())


def test_no_tracked_file_holds_a_machine_s_path():
    found = []
    for name in tracked_files():
        path = REPOSITORY / name
        if path.is_symlink():
            found += [f"{name} -> {path.readlink()}"] * path.readlink().is_absolute()
            continue
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{name}:{number}: {line.decode(errors='replace').strip()}")
    assert not found, "name a relative or an invented path instead:\n" + "\n".join(found)


@pytest.mark.parametrize("name", ["README.md.cache/a.json", "x/__pycache__/a.py", "lib/a.so"])
def test_a_built_file_is_found(name):
    assert BUILT.search(name)


def test_no_cache_and_no_built_file_is_tracked():
    found = [name for name in tracked_files() if BUILT.search(name)]
    assert not found, "remove them from git, and name them in .gitignore: " + ", ".join(found)
