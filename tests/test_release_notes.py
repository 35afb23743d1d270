"""A tag decides the version, and a release's notes come from the changelog where all three agree."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile

import pytest

from tests import REPOSITORY

pytest.importorskip("setuptools_scm", reason="in the extra [dev]")

PROGRAM = REPOSITORY / "wheels" / "release_notes.py"
CHANGELOG = """# Changelog

## 1.2.3 (2026-11-26)

Many words.

- One change, told
  in two lines
  - and what it has below it.
- Another change.

## 1.2.2 (2026-10-01)

- The old one.
"""
NOTES = """Many words.

- One change, told in two lines
  - and what it has below it.
- Another change.
"""


def git(folder, *words):
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    done = subprocess.run(
        ["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def version_of(folder):
    done = subprocess.run(
        [sys.executable, "-m", "setuptools_scm"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def notes_of(folder, version="1.2.3"):
    """Exit status, output and error of the program."""
    done = subprocess.run(
        [sys.executable, PROGRAM, version, "--root", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def checkout(tmp_path):
    """A repository with Tessera's settings, whose one commit has the tag v1.2.3."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("pyproject.toml", ".gitattributes", ".git_archival.txt"):
        shutil.copy(REPOSITORY / name, folder)
    (folder / "CHANGELOG.md").write_text(CHANGELOG)
    git(folder, "init", "--quiet")
    commit(folder)
    git(folder, "tag", "-a", "v1.2.3", "-m", "Tessera 1.2.3")
    return folder


def commit(folder, changelog=None):
    if changelog is not None:
        (folder / "CHANGELOG.md").write_text(changelog)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--allow-empty", "-m", "A change")


def test_a_tag_decides_the_version(checkout):
    assert version_of(checkout) == "1.2.3"
    commit(checkout)
    assert re.fullmatch(r"1\.2\.4\.dev1\+g[0-9a-f]+", version_of(checkout))


def test_an_archive_of_git_knows_its_version(checkout, tmp_path):
    git(checkout, "archive", "--output", str(tmp_path / "archive.tar"), "HEAD")
    with tarfile.open(tmp_path / "archive.tar") as archive:
        # Python 3.10.11 and 3.11.3 and older have no filters.
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(tmp_path / "archive", **safely)
    assert version_of(tmp_path / "archive") == "1.2.3"


def test_without_git_the_version_is_0_0(checkout, tmp_path):
    shutil.rmtree(checkout / ".git")
    assert version_of(checkout) == "0.0"


def test_the_notes_are_the_section_of_the_changelog(checkout, tmp_path):
    assert notes_of(checkout) == (0, NOTES, "")


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("1.2.3 (2026-11-26)", "1.2.3 (unreleased)", "write the day of the release"),
        ("1.2.3 (2026-11-26)", "1.2.4 (2026-11-26)", "begins with 1.2.4, and not with 1.2.3"),
        ("## 1.2", "### 1.2", "has no heading of the form"),
    ],
)
def test_a_heading_that_does_not_agree(checkout, before, after, told):
    commit(checkout, CHANGELOG.replace(before, after))
    git(checkout, "tag", "--force", "v1.2.3")
    status, output, error = notes_of(checkout)
    assert (status, output) == (2, "")
    assert told in error
    assert error.count("\n") == 1


def test_a_tag_that_does_not_agree(checkout):
    commit(checkout)
    status, _, error = notes_of(checkout)
    assert status == 2
    assert "the tag v1.2.3 is at" in error
    git(checkout, "tag", "--delete", "v1.2.3")
    assert "there is no tag v1.2.3: git tag -a v1.2.3" in notes_of(checkout)[2]


def test_a_version_that_does_not_agree(checkout):
    (checkout / "CHANGELOG.md").write_text(CHANGELOG + "- A late thought.\n")
    status, output, error = notes_of(checkout)
    assert (status, output) == (2, "")
    assert "the checkout's version is 1.2.4.dev0+" in error
    assert "version 'v1.2.3': give a release" in notes_of(checkout, "v1.2.3")[2]


def test_the_changelog_can_be_released():
    """Its first heading names the next release, which is what the files in deploy/ are written for."""
    headings = re.findall(r"^## (.*)$", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    found = [
        re.fullmatch(r"(\d+\.\d+\.\d+) \((unreleased|\d{4}-\d\d-\d\d)\)", line) for line in headings
    ]
    assert all(found), headings
    assert all(match[2] != "unreleased" for match in found[1:])
    images = [
        version
        for path in (REPOSITORY / "deploy").rglob("*")
        if path.is_file()
        for version in re.findall(
            r"\b(?:tessera(?:-server|-gpu)?:|newTag: )(\d[\w.]*)",
            path.read_text(encoding="utf-8", errors="ignore"),
        )
    ]
    assert len(images) >= 8
    assert set(images) == {found[0][1]}


def test_the_notes_of_the_next_release_can_be_told():
    spec = importlib.util.spec_from_file_location("release_notes", PROGRAM)
    release_notes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(release_notes)
    text = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    version = re.search(r"^## (\S+) ", text, re.MULTILINE)[1]
    notes = release_notes.section(text.replace("(unreleased)", "(2026-11-26)"), version)
    section = re.split(r"^## ", text, flags=re.MULTILINE)[1]
    items = re.findall(r"^- ", section, re.MULTILINE)
    assert len(re.findall(r"^- ", notes, re.MULTILINE)) == len(items) > 0
    assert "## " not in notes
