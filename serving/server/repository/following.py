"""The logs of the versions that a repository manager has loaded, and what is told of them.

Owned by the event loop's thread; the follower has one of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tessera.serving.package.pace import ASIDE_NICENESS
from tessera.serving.server.config import ServerConfig
from tessera.serving.server.follow.commit_reader import CommitReader
from tessera.serving.server.follow.followed_model import FollowedModel
from tessera.serving.server.follow.follower import Follower, steps
from tessera.serving.server.follow.undo_memory import UndoMemory
from tessera.serving.server.follow.version_log import Did, Step, VersionLog
from tessera.serving.server.metrics.follow_metrics import FollowMetrics
from tessera.serving.server.model.loader import PackageLoader
from tessera.serving.server.named_thread import NamedThread
from tessera.serving.server.repository.version_loader import at_priority


class Following:
    """The logs of one server's versions.

    Args:
        config: how they are followed.
        reader: reads the files of commits; None: they are read in this process.
        metrics: shows what is done.
        log: where it is told.
        changed: called when a log's version has another state, or is stopped by something else.
        reload: called when a version has to be loaded anew to go back.
    """

    def __init__(
        self,
        *,
        config: ServerConfig,
        reader: CommitReader | None,
        metrics: FollowMetrics,
        log: Any,
        changed: Callable[[], None],
        reload: Callable[[VersionLog], None],
    ) -> None:
        self._metrics = metrics
        self._log = log
        self._changed = changed
        self._reload = reload
        self._reader = reader
        self._keys = PackageLoader.of(config).trusted_keys
        self._undo = UndoMemory(config.rollback_bytes)
        self._loop = asyncio.get_running_loop()
        self._follower = Follower(
            poll_s=config.follow_poll_ms / 1e3,
            tell=self._tell,
            log=log,
        )

    def replay(
        self, model: str, version: int, folder: Path, followed: FollowedModel
    ) -> tuple[VersionLog, list[Step]]:
        """Put in what the log has by now, before the version answers; blocks, and belongs on a thread of its own."""
        log = VersionLog(
            model=model,
            version=version,
            folder=folder,
            followed=followed,
            trusted_keys=self._keys,
            undo=self._undo,
            reader=self._reader,
        )
        return log, at_priority(ASIDE_NICENESS, lambda: list(steps(log)))

    def begin(self, log: VersionLog, replayed: Sequence[Step]) -> None:
        """The version of ``log`` answers from now on, and follows it."""
        self._metrics.follow(log.model, str(log.version))
        for step in replayed:
            self._told(log, step)
        log.beside_others = True
        self._follower.add(log)

    def end(self, log: VersionLog) -> None:
        """The version answers no more, or another log stands for it."""
        self._follower.remove(log)

    def look(self) -> None:
        """Look at all logs at once."""
        self._follower.look()

    def close(self) -> None:
        """Follow nothing any more."""
        self._follower.close()
        if self._reader is not None:
            # A commit that is being read is waited for, and this is the event loop's thread.
            NamedThread(target=self._reader.close, name="reader-end", daemon=True).start()

    def _tell(self, log: VersionLog, step: Step) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed without waiting
            self._loop.call_soon_threadsafe(self._told, log, step)

    def _told(self, log: VersionLog, step: Step) -> None:
        version = str(log.version)
        told = self._log.bind(model=log.model, version=version)
        if step.did is Did.TOOK:
            self._metrics.count_commit(log.model, version, step.rows, step.seconds)
            told.info("commit", commit=step.commit, rows=step.rows, seconds=round(step.seconds, 6))
        elif step.did is Did.WENT_BACK:
            told.info("rolled_back", commit=step.commit, from_commit=step.before)
        elif step.did is Did.REFUSED and step.refused is not None:
            refused = step.refused
            self._metrics.count_refusal(log.model, version, refused.reason)
            told.warning(
                "commit_refused",
                commit=refused.commit,
                reason=refused.reason,
                message=refused.message,
            )
        elif step.did is Did.MUST_RELOAD:
            self._reload(log)
        self._changed()
