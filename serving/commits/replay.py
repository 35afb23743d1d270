"""Bring a version in memory to the end of its log, as a server does that starts late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tessera.errors import UserError
from tessera.serving.commits.chain import (
    LOG_FOLDER,
    StepKind,
    commit_name,
    next_step,
    number_after,
    parse_commit_name,
    refusal,
)
from tessera.serving.commits.fence import read_fence, write_fence
from tessera.serving.commits.file import CommitError, ReadCommit, read_commit
from tessera.serving.commits.state import VersionState

_MOST_FENCED = 10_000


@dataclass(frozen=True, kw_only=True)
class Broken:
    """Where a log cannot be followed any further.

    Attributes:
        number: of the commit that is missing or not taken.
        reason: one of `REFUSALS`.
        words: for people.
    """

    number: int
    reason: str
    words: str


def replay(
    state: VersionState,
    folder: Path,
    *,
    last: int | None = None,
    on_commit: Callable[[ReadCommit], None] = lambda _: None,
) -> Broken | None:
    """Apply the commits of a log to a state that has none yet.

    Args:
        state: of the log's version; changed.
        folder: the log's.
        last: the number of the last one to take; None: all that there are.
        on_commit: called with each commit once it is taken.

    Returns:
        What ends the log before its last file; None: nothing does.

    Raises:
        UserError: the fence cannot be read.
    """
    applied: list[int] = []
    fence = read_fence(folder)
    names = frozenset(_names(folder))
    while True:
        following = commit_name(number_after(state.log.number, fence))
        step = next_step([following] if following in names else names, fence, applied)
        if step.kind is StepKind.WAIT or (last is not None and step.number > last):
            return None
        path = folder / commit_name(step.number)
        if step.kind is StepKind.GAP:
            return Broken(number=step.number, reason="gap", words=f"{path} is missing")
        try:
            read = read_commit(path)
            found = refusal(
                read.commit, read.sha256, named=step.number, state=state.log, fence=fence
            )
            if found is not None:
                return Broken(
                    number=step.number, reason=found[0], words=f"commit {path}: {found[1]}"
                )
            state.apply(read)
        except CommitError as error:
            return Broken(number=step.number, reason=error.refusal, words=str(error))
        except ValueError as error:
            return Broken(number=step.number, reason="schema", words=f"commit {path}: {error}")
        applied.append(step.number)
        on_commit(read)


def fence_rest(state: VersionState, folder: Path) -> list[int]:
    """Fence off everything behind the state, so that a publisher can go on; returns the new numbers.

    Raises:
        UserError: the log has a commit of a number so large that the missing ones are too many, or the
            fence cannot be written.
    """
    fence = read_fence(folder)
    begin, end = state.log.number + 1, next_number(folder)
    if end - begin > _MOST_FENCED + len(fence.commits):
        raise UserError(
            f"{folder / commit_name(end - 1)} is {end - begin} commits behind the last good one; move it away"
        )
    new = [number for number in range(begin, end) if number not in fence.commits]
    if new:
        write_fence(folder, {number: _sha256(folder / commit_name(number)) for number in new})
    return new


def next_number(folder: Path) -> int:
    """The number after the greatest that is there or fenced."""
    numbers = [number for name in _names(folder) if (number := parse_commit_name(name)) is not None]
    return max([0, *numbers, *read_fence(folder).commits]) + 1


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from error


def _sha256(path: Path) -> str:
    """The hash of a commit for the fence; empty where it cannot be read."""
    try:
        return read_commit(path).sha256
    except CommitError:
        return ""


def log_folder(version_folder: Path) -> Path:
    """The folder of a version's commits."""
    return version_folder / LOG_FOLDER
