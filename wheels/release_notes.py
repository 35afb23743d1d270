"""Prints what the changelog says of a release, where the tag, the version and the changelog agree on it.

    python wheels/release_notes.py 0.1.0 [--out NOTES.md]

A release is a commit with the tag vVERSION.  Its version is what setuptools-scm makes of that tag, and its notes are
the section ``## VERSION (YYYY-MM-DD)`` of CHANGELOG.md, the first one of that file.  Lines that the changelog wraps
are joined, as the pages of releases keep the ends of lines.

Exit status: 0 the notes were printed; 2 something does not agree, which is on the terminal.
"""

from __future__ import annotations

import argparse
import datetime as dt
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r"\d+\.\d+\.\d+(rc\d+)?")
_HEADING = re.compile(r"^## (\S+) \((.+)\)$", re.MULTILINE)
_USER_ERROR = 2


class DisagreementError(ValueError):
    """Two of the tag, the version and the changelog differ, or one is missing."""


def main() -> int:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="the version to release, such as 0.1.0 or 0.2.0rc1")
    parser.add_argument("--out", type=Path, metavar="FILE", help="(default: the standard output)")
    parser.add_argument(
        "--root", type=Path, default=ROOT, metavar="FOLDER", help="the checkout (default: this one)"
    )
    args = parser.parse_args()
    try:
        notes = release_notes(args.root, args.version)
    except DisagreementError as error:
        print(f"release_notes.py: error: {error}", file=sys.stderr)
        return _USER_ERROR
    if args.out:
        args.out.write_text(notes, encoding="utf-8")
    else:
        print(notes, end="")
    return 0


def release_notes(root: Path, version: str) -> str:
    """The notes of the release ``version`` of the checkout ``root``, in Markdown.

    Raises:
        DisagreementError: naming what does not agree, and what to do about it.
    """
    if not VERSION.fullmatch(version):
        raise DisagreementError(f"version {version!r}: give a release, such as 0.1.0 or 0.2.0rc1")
    notes = section((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    check_tag(root, version)
    found = _output(root, sys.executable, "-m", "setuptools_scm")
    if found != version:
        raise DisagreementError(
            f"the checkout's version is {found or 'not known to setuptools-scm'}, and not {version}: "
            "commit what has changed since the tag, or take it back"
        )
    return notes


def section(changelog: str, version: str) -> str:
    """What ``changelog`` says of ``version``, which must be its first section and have a date.

    Raises:
        DisagreementError: there is no such section, it has no date, or another one comes first.
    """
    headings = list(_HEADING.finditer(changelog))
    if not headings:
        raise DisagreementError("CHANGELOG.md has no heading of the form: ## 0.1.0 (2026-01-31)")
    first = headings[0]
    if first[1] != version:
        raise DisagreementError(
            f"CHANGELOG.md begins with {first[1]}, and not with {version}: release what it begins with, or write "
            f"the section ## {version} ({_today()})"
        )
    try:
        dt.date.fromisoformat(first[2])
    except ValueError:
        raise DisagreementError(
            f"CHANGELOG.md has the heading '{first[0]}': write the day of the release, ## {version} ({_today()})"
        ) from None
    end = headings[1].start() if len(headings) > 1 else len(changelog)
    return _unwrapped(changelog[first.end() : end].strip()) + "\n"


def check_tag(root: Path, version: str) -> None:
    """Compare the tag of ``version`` with the commit that is checked out.

    Raises:
        DisagreementError: there is no such tag, or it is another commit's.
    """
    tag = f"v{version}"
    tagged = _output(root, "git", "rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}")
    if not tagged:
        raise DisagreementError(f"there is no tag {tag}: git tag -a {tag} -m 'Tessera {version}'")
    here = _output(root, "git", "rev-parse", "HEAD")
    if tagged != here:
        raise DisagreementError(
            f"the tag {tag} is at {tagged[:12]}, and {here[:12]} is checked out: git checkout {tag}"
        )


def _unwrapped(text: str) -> str:
    # A line that begins with two spaces goes on with its item, unless it begins an item within it.
    return re.sub(r"\n +(?![-*] )(?=\S)", " ", text)


def _today() -> str:
    return dt.datetime.now(dt.timezone.utc).date().isoformat()


def _output(root: Path, *command: str) -> str:
    """What ``command`` prints; empty where it fails."""
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    raise SystemExit(main())
