"""Which commit comes next: pure functions of the folder's names, the fence and the state.

Commits are numbered from 1 on.  The state of a version is the list of commits that it has taken.  Numbers in
the fence are passed over as if they had never been; every other number below one that is there must be
there, too.  `tests/commits/cases.json` holds both servers to the same cases.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from tessera.serving.package.commit import MAX_COMMIT_NUMBER, Commit

LOG_FOLDER = "log"
"""The folder of a version's commits, beside its ``model.pt``."""

_NAME = re.compile(r"([0-9]{8})\.commit", re.ASCII)


def commit_name(number: int) -> str:
    """The name of a commit's file."""
    return f"{number:08d}.commit"


def parse_commit_name(name: str) -> int | None:
    """The number of the commit that a file of this name holds; None: it holds none."""
    found = _NAME.fullmatch(name)
    number = 0 if found is None else int(found.group(1))
    return number if 1 <= number <= MAX_COMMIT_NUMBER else None


@dataclass(frozen=True)
class Fence:
    """The commits that nobody may take again.

    Attributes:
        commits: by number, `unsigned_sha256` of the ``commit.json``; empty: it could not be read.
    """

    commits: Mapping[int, str] = field(default_factory=dict)

    def hashes(self) -> frozenset[str]:
        """The fenced commits that are known by their hash."""
        return frozenset(self.commits.values()) - {""}


class StepKind(Enum):
    """What to do next."""

    WAIT = "wait"
    """Nothing new is there."""

    TAKE = "take"
    """Read the commit of the number, and take it if `refusal` has nothing against it."""

    BACK = "back"
    """Go back to the state after the commit of the number (0: the package itself): a later one was fenced."""

    GAP = "gap"
    """The commit of the number is missing, and later ones are there."""


@dataclass(frozen=True)
class Step:
    """What to do next, and the commit's number (0 for `StepKind.WAIT`)."""

    kind: StepKind
    number: int = 0


def number_after(state: int, fence: Fence) -> int:
    """The first number behind ``state`` that is not fenced: that of the commit which comes next."""
    number = state + 1
    while number in fence.commits:
        number += 1
    return number


def next_step(names: Iterable[str], fence: Fence, applied: Sequence[int]) -> Step:
    """What a follower of the log does next.

    Args:
        names: what lies in the log's folder; names of other things are passed over.
        fence: that of the folder.
        applied: the numbers of the commits that the state is made of, ascending.
    """
    # By way of the fence, which has few: the log may be long.
    fenced = [at for number in fence.commits if (at := _place(applied, number)) is not None]
    if fenced:
        return Step(StepKind.BACK, applied[min(fenced) - 1] if min(fenced) else 0)
    state = applied[-1] if applied else 0
    numbers = {number for name in names if (number := parse_commit_name(name)) is not None}
    later = sorted(number for number in numbers if number > state and number not in fence.commits)
    if not later:
        return Step(StepKind.WAIT)
    # Walking from number to number would take long where a name has a large one.
    between = later[0] - state - 1
    passed = sum(state < number < later[0] for number in fence.commits)
    if passed < between:
        return Step(StepKind.GAP, number_after(state, fence))
    return Step(StepKind.TAKE, later[0])


def _place(numbers: Sequence[int], number: int) -> int | None:
    """Where ``number`` is among ascending ones; None: it is not there."""
    at = bisect_left(numbers, number)
    return at if at < len(numbers) and numbers[at] == number else None


@dataclass(frozen=True, kw_only=True)
class LogState:
    """Where a version stands.

    Attributes:
        model: its name.
        version: its number.
        base: `unsigned_sha256` of its package's manifest.
        number: of the last commit that it has taken; 0: none.
        sha256: `unsigned_sha256` of that commit's ``commit.json``; where there is none, ``base``.
    """

    model: str
    version: int
    base: str
    number: int
    sha256: str


def refusal(
    commit: Commit, sha256: str, *, named: int, state: LogState, fence: Fence
) -> tuple[str, str] | None:
    """Why a commit is not the next one.

    Args:
        commit: what its file says.
        sha256: `unsigned_sha256` of its ``commit.json``.
        named: the number in its file's name.
        state: what it would be applied to.
        fence: that of the folder.

    Returns:
        One of `REFUSALS` and the words for people; None: it is the next one.
    """
    fenced = fence.hashes()
    checks = (
        (
            (commit.model, commit.version) == (state.model, state.version),
            "base",
            f"is for {commit.model!r} {commit.version}, not for {state.model!r} {state.version}",
        ),
        (
            commit.base == state.base,
            "base",
            f"is for the package {commit.base}, and this version's is {state.base}",
        ),
        (
            commit.number == named,
            "repeat" if commit.number <= state.number else "gap",
            f"holds commit {commit.number}, expected {named}",
        ),
        (sha256 not in fenced, "fenced", "was fenced off under another number"),
        (
            commit.previous not in fenced,
            "fenced",
            f"builds on the commit {commit.previous}, which was fenced off",
        ),
        (
            commit.previous == state.sha256,
            "chain",
            f"builds on the commit {commit.previous}, and the one before is {state.sha256}",
        ),
    )
    return next(((reason, words) for holds, reason, words in checks if not holds), None)
