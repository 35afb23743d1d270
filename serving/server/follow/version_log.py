"""The log of one version that answers: which commits it has taken, what it does next, and what stopped it.

One thread at a time works on it: the one that loads the version, then the follower's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from tessera.errors import UserError
from tessera.serving.commits.chain import (
    LOG_FOLDER,
    Fence,
    LogState,
    StepKind,
    commit_name,
    next_step,
    number_after,
    refusal,
)
from tessera.serving.commits.fence import read_fence
from tessera.serving.commits.file import CommitError, read_commit
from tessera.serving.package.archive import file_identity
from tessera.serving.package.pace import Pace
from tessera.serving.server.follow.commit_reader import CommitReader
from tessera.serving.server.follow.followed_model import FollowedModel, StagedCommit, UndoRecord
from tessera.serving.server.follow.log_listing import LogListing
from tessera.serving.server.follow.undo_memory import UndoMemory, UndoRecords

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

MAX_COMMIT_FILE_BYTES = 4 << 30
"""A larger file is not read: it is held in memory before it is put in."""

_AGAIN_S = 5.0

_STAGING_PAUSES_S = 0.5
"""A commit is read and staged with pauses until its file has had its name for so long: one that is late is not made later."""

_WRITING_PAUSES_S = 0.75
"""Then its rows are written with pauses until it has had its name for so long: the next commit waits for the end of that."""


@dataclass(frozen=True, kw_only=True)
class Applied:
    """A commit that the state has.

    Attributes:
        number: its own.
        sha256: `unsigned_sha256` of its ``commit.json``.
        newest_example_s: when the newest training example was made, seconds since 1970; None: not known.
    """

    number: int
    sha256: str
    newest_example_s: float | None


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """What stopped the log.

    Attributes:
        commit: the number of what is not taken.
        reason: one of `REFUSALS`.
        message: for people.
        seen: of the files, and the state, that it is about: the same ones are refused again without being read
            until ``again``; None: to be looked at again.
        again: seconds of ``time.monotonic``.
    """

    commit: int
    reason: str
    message: str
    seen: object = None
    again: float = field(default=math.inf, compare=False)


class Did(Enum):
    """What a step has done."""

    NOTHING = "nothing"
    TOOK = "took"
    WENT_BACK = "went back"
    REFUSED = "refused"
    MUST_RELOAD = "must reload"
    """A fenced commit cannot be taken back from memory: the version has to be loaded anew."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step has done.

    Attributes:
        did: of which kind.
        commit: the number of the state's last commit afterwards.
        before: and before.
        rows: of tables that were put in.
        seconds: that passes had to wait for it at most.
        refused: what was refused.
    """

    did: Did
    commit: int
    before: int
    rows: int = 0
    seconds: float = 0.0
    refused: Refusal | None = None


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What others see of a log.

    Attributes:
        commit: the number of the state's last commit; 0: none.
        newest_example_s: when the newest training example of the state was made, seconds since 1970; None: not known.
        refused: what stops it; None: nothing does.
    """

    commit: int = 0
    newest_example_s: float | None = None
    refused: Refusal | None = None


class VersionLog:
    """Follows one version's log.

    Args:
        model: the model's name.
        version: the version's number.
        folder: the version's.
        followed: the model in memory.
        trusted_keys: one of which must have signed a commit; None: signatures are not looked at.
        undo: what goes back draws on.
        reader: reads the files of commits; None: they are read in this process.

    Attributes:
        beside_others: whether the version answers meanwhile, for which reading and staging pause.
        refused: what stopped it; None: nothing does.
        shown: what others see of it, from any thread.
    """

    def __init__(
        self,
        *,
        model: str,
        version: int,
        folder: Path,
        followed: FollowedModel,
        trusted_keys: Sequence[Ed25519PublicKey] | None,
        undo: UndoMemory,
        reader: CommitReader | None = None,
    ) -> None:
        self.model = model
        self.version = version
        self.folder = folder / LOG_FOLDER
        self.followed = followed
        self.refused: Refusal | None = None
        self.beside_others = False
        self._reader = reader
        self._trusted_keys = trusted_keys
        self._undo = undo
        self._records = UndoRecords()
        self._listing = LogListing(self.folder)
        self._applied: list[Applied] = []
        self._numbers: list[int] = []  # of those
        self.shown = Shown()

    @property
    def commit(self) -> int:
        """The number of the state's last commit; 0: none."""
        return self._applied[-1].number if self._applied else 0

    def has(self, commit: int) -> bool:
        """Whether ``commit`` is in the state; any thread."""
        return commit == 0 or any(one.number == commit for one in self._applied)

    def first_after(self, commit: int) -> int:
        """The number of the first commit of the state after ``commit``; there is one."""
        return next(one.number for one in self._applied if one.number > commit)

    def close(self) -> None:
        """Let go of what is kept to go back."""
        self._undo.forget(self._records)

    def step(self) -> Step:
        """Do the next thing that the folder asks for, if there is one."""
        before = self.commit
        try:
            step = self._step(before)
            if step.did is not Did.MUST_RELOAD:
                self.refused = None
        except _StoppedError as stopped:
            new = stopped.refusal != self.refused
            self.refused = stopped.refusal
            step = Step(
                did=Did.REFUSED if new else Did.NOTHING,
                commit=before,
                before=before,
                refused=stopped.refusal,
            )
        newest = self._applied[-1].newest_example_s if self._applied else None
        self.shown = Shown(commit=self.commit, newest_example_s=newest, refused=self.refused)
        return step

    def _step(self, before: int) -> Step:
        fence = self._fence()
        step = next_step((), fence, self._numbers)
        try:
            if step.kind is StepKind.WAIT:  # nothing is to be taken back
                names = self._listing.names_from(number_after(before, fence))
                step = next_step(names, fence, self._numbers)
        except OSError as error:
            message = f"{self.folder}: cannot be read ({error.strerror})"
            raise _StoppedError(before + 1, "damaged", message) from error
        if step.kind is StepKind.BACK:
            return self._go_back(step.number)
        if step.kind is StepKind.GAP:
            raise _StoppedError(step.number, "gap", "is missing, and later ones are there")
        if step.kind is StepKind.TAKE:
            return self._take(step.number, fence)
        return Step(did=Did.NOTHING, commit=before, before=before)

    def _fence(self) -> Fence:
        try:
            return read_fence(self.folder)
        except UserError as error:
            raise _StoppedError(self.commit + 1, "fenced", str(error)) from error

    def _go_back(self, number: int) -> Step:
        before = self.commit
        kept = [one for one in self._applied if one.number <= number]
        count = len(self._applied) - len(kept)
        undone = self._undo.newest(self._records, count)
        if undone is None:
            return Step(did=Did.MUST_RELOAD, commit=before, before=before)
        self.followed.take_back(undone, number)
        self._applied = kept
        self._numbers = [one.number for one in kept]
        self._undo.forget(self._records, count)
        return Step(did=Did.WENT_BACK, commit=number, before=before)

    def _take(self, number: int, fence: Fence) -> Step:
        path = self.folder / commit_name(number)
        seen = (_identity(path), fence, self._state())
        past = self.refused
        if past is not None and past.seen == seen and time.monotonic() < past.again:
            raise _StoppedError(number, past.reason, past.message, seen, past.again)
        try:
            staged, named_s = self._staged(path, number, fence)
            if (
                self._fence() != fence
            ):  # reading may have taken long, and it may be fenced off by now
                return Step(did=Did.NOTHING, commit=self.commit, before=self.commit)
            seconds = self.followed.put_in(
                staged, pauses_end_s=time.monotonic() + self._pause_s(named_s, _WRITING_PAUSES_S)
            )
        except CommitError as error:
            # What the system could not read says nothing about the file.
            unread = isinstance(error.__cause__, OSError)
            again = time.monotonic() + _AGAIN_S if unread else math.inf
            raise _StoppedError(number, error.refusal, error.reason, seen, again) from error
        except OSError as error:
            raise _StoppedError(number, "damaged", f"cannot be read: {error.strerror}") from error
        except MemoryError as error:
            message = f"cannot be staged: {error or 'no memory left'}"
            again = time.monotonic() + _AGAIN_S
            raise _StoppedError(number, "memory", message, seen, again) from error
        before = self.commit
        commit = staged.read.commit
        self._applied.append(
            Applied(
                number=number, sha256=staged.read.sha256, newest_example_s=commit.newest_example_s
            )
        )
        self._numbers.append(number)
        self._undo.keep(self._records, UndoRecord.of(staged))
        rows = {patch.rows or patch.bytes: patch.count for patch in commit.patches if patch.table}
        return Step(
            did=Did.TOOK, commit=number, before=before, rows=sum(rows.values()), seconds=seconds
        )

    def _staged(self, path: Path, number: int, fence: Fence) -> tuple[StagedCommit, float]:
        """The commit in ``path``, which is the next one, ready to be put in; and when the file got its name, seconds since 1970."""
        status = path.stat()
        size = status.st_size
        if size > MAX_COMMIT_FILE_BYTES:
            words = f"has {size} bytes, the limit is {MAX_COMMIT_FILE_BYTES}"
            raise CommitError(path, words, "memory")
        pause_s = self._pause_s(status.st_ctime, _STAGING_PAUSES_S)
        pace = Pace(pause_s)
        if self._reader is None:
            read = read_commit(path, self._trusted_keys, pace if pause_s else None)
        else:
            read = self._reader.read(path, pause_s=pause_s)
        found = refusal(read.commit, read.sha256, named=number, state=self._state(), fence=fence)
        if found is not None:
            raise CommitError(path, found[1], found[0])
        staged = self.followed.stage(path, read, pace, beside_others=self.beside_others)
        return staged, status.st_ctime

    def _pause_s(self, named_s: float, most_s: float) -> float:
        """How long others may be made room for, where the commit's file got its name at ``named_s`` since 1970."""
        if not self.beside_others:
            return 0.0
        return min(max(most_s - (time.time() - named_s), 0.0), most_s)

    def _state(self) -> LogState:
        return LogState(
            model=self.model,
            version=self.version,
            base=self.followed.base,
            number=self.commit,
            sha256=self._applied[-1].sha256 if self._applied else self.followed.base,
        )


class _StoppedError(Exception):
    """The log cannot go on."""

    def __init__(
        self, commit: int, reason: str, message: str, seen: object = None, again: float = math.inf
    ) -> None:
        super().__init__(message)
        self.refusal = Refusal(
            commit=commit, reason=reason, message=message, seen=seen, again=again
        )


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        return file_identity(path)
    except OSError:
        return None
