"""Going back to an earlier commit of a version that answers: the fence is written, and then followed at once."""

from __future__ import annotations

from tessera.errors import UserError
from tessera.serving.commits.fence import fence_off_after
from tessera.serving.repository.changes import ChangeRefusal, RefusedChangeError, refuse_missing
from tessera.serving.server.daemon_thread import in_thread
from tessera.serving.server.repository.manager import RepositoryManager
from tessera.serving.server.repository.model_versions import ModelVersions


async def go_back_to(
    manager: RepositoryManager, model: ModelVersions, version: int, commit: int, *, answers: bool
) -> None:
    """Fence off the commits of ``version`` after ``commit``, and return when none of them is in what answers.

    Args:
        manager: of the repositories.
        model: whose version it is.
        version: that follows its log.
        commit: the last one that stays; 0: none stays.
        answers: whether requests without a version go to this one.

    Raises:
        RefusedChangeError: NOT_FOUND, there is no such state; FAILED_PRECONDITION, the version follows no log, answers
            with this state already, or cannot be brought back.
        ServeError: UNAVAILABLE, the server drains.
    """
    if manager.following is None:
        raise _refused(
            "rollback to a commit needs --follow; start the server with it, or name a version"
        )
    refuse_missing(model.situation(), version, model.present)
    live = model.live.get(version)
    state = f"{version}.{commit}"
    if live is None or live.log is None:
        raise _refused(
            f"version '{version}' of model '{model.name}' is not loaded; load it, and then go back to '{state}'"
        )
    log = live.log
    now = log.shown.commit
    if commit == now:
        if answers:
            raise _refused(f"state '{state}' of model '{model.name}' answers already")
        return
    if not log.has(commit):
        raise RefusedChangeError(
            ChangeRefusal.NOT_FOUND,
            f"model '{model.name}' has no state '{state}'; version {version} is at {version}.{now}",
        )
    undone = log.first_after(commit)
    try:
        await in_thread(lambda: fence_off_after(log.folder, commit))
    except UserError as error:
        raise _refused(str(error)) from error
    model.forgive(frozenset({version}))
    manager.following.look()
    await manager.until(lambda: _is_back(model, version, undone) or version in model.reasons)
    if not _is_back(model, version, undone):
        raise _refused(
            f"version '{version}' of model '{model.name}' could not be loaded: {model.reasons[version]}"
        )


def _is_back(model: ModelVersions, version: int, undone: int) -> bool:
    """Whether the commit ``undone`` is not in what answers."""
    live = model.live.get(version)
    return live is None or live.log is None or not live.log.has(undone)


def _refused(message: str) -> RefusedChangeError:
    return RefusedChangeError(ChangeRefusal.FAILED_PRECONDITION, message)
