"""What RepositoryModelLoad and RepositoryModelUnload do, without a transport.

A call loads first what it needs, then records its outcome in control.json, and only then changes what answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from tessera.errors import UserError
from tessera.serving.repository.changes import (
    Change,
    LoadRequest,
    RefusedChangeError,
    Situation,
    change_by_load,
    change_by_unload,
)
from tessera.serving.repository.choice import answering_version
from tessera.serving.repository.control import write_control
from tessera.serving.server.daemon_thread import in_thread
from tessera.serving.server.errors import Code, ServeError
from tessera.serving.server.repository.going_back import go_back_to
from tessera.serving.server.repository.manager import RepositoryManager
from tessera.serving.server.repository.model_versions import ModelVersions
from tessera.serving.server.repository.reading import read_model

MAX_WAITING_CALLS = 64
"""Calls that wait while another one is being carried out."""


class RepositoryCalls:
    """Changes what is wanted, one call at a time.

    Args:
        manager: of the repositories; None: there are none.
        control: ``--model-control``.
        fixed: the names of ``--model``.
    """

    def __init__(
        self, manager: RepositoryManager | None, control: str, fixed: frozenset[str]
    ) -> None:
        self._manager = manager
        self._control = control
        self._fixed = fixed
        self._one_at_a_time = asyncio.Lock()
        self._waiting = 0

    async def load(self, name: str, request: LoadRequest) -> None:
        """Load what ``request`` asks for, and return when it answers.

        Raises:
            ServeError: NOT_FOUND, INVALID_ARGUMENT, or FAILED_PRECONDITION, also where a version cannot be
                loaded; UNAVAILABLE where the server drains; RESOURCE_EXHAUSTED where too many calls wait.
                Nothing has changed then.
        """
        if request.rollback and request.commit is not None:
            await self._go_back(name, replace(request, commit=None), request.commit)
        else:
            await self._change(name, lambda situation: change_by_load(situation, request))

    async def _go_back(self, name: str, request: LoadRequest, commit: int) -> None:
        manager = self._allowed(name)
        await asyncio.shield(
            asyncio.ensure_future(self._go_back_to(manager, name, request, commit))
        )

    async def _go_back_to(
        self, manager: RepositoryManager, name: str, request: LoadRequest, commit: int
    ) -> None:
        """Let the version that ``request`` names answer, with its commits until ``commit``."""
        async with self._turn():
            model = await self._read(manager, name)
            try:
                situation = model.situation()
                answers = answering_version(model.wanted, situation.ready) == request.to
                if not answers:
                    change_by_load(situation, request)  # where it is refused, nothing is fenced off
                await go_back_to(manager, model, request.to or 0, commit, answers=answers)
            except RefusedChangeError as error:
                raise ServeError(Code(error.refusal.value), error.message) from None
            finally:
                model.asked = None
                model.decide()
                manager.publish(model)
                manager.wake()
        if not answers:
            await self._make_change(manager, name, lambda now: change_by_load(now, request))

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One call at a time; so many wait, and no more."""
        if self._waiting >= MAX_WAITING_CALLS:
            raise ServeError(
                Code.RESOURCE_EXHAUSTED,
                f"{MAX_WAITING_CALLS} calls about repositories wait already; try again when one has been answered",
            )
        self._waiting += 1
        try:
            await self._one_at_a_time.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._one_at_a_time.release()

    async def unload(self, name: str, version: int | None) -> None:
        """Unload ``version``, or the whole model, and return when it has given back its memory.

        Raises:
            ServeError: see `load`.
        """
        await self._change(name, lambda situation: change_by_unload(situation, version))

    async def _change(self, name: str, make: Callable[[Situation], Change]) -> None:
        manager = self._allowed(name)
        # A client that goes away does not leave half of a change.
        await asyncio.shield(asyncio.ensure_future(self._make_change(manager, name, make)))

    def _allowed(self, name: str) -> RepositoryManager:
        if self._manager is None:
            raise ServeError(
                Code.FAILED_PRECONDITION,
                "this server has no repository; calls may load and unload with --model-repository DIR "
                "and --model-control explicit",
            )
        if self._control != "explicit":
            raise ServeError(
                Code.FAILED_PRECONDITION,
                f"--model-control is {self._control}; calls may load and unload with --model-control explicit",
            )
        if name in self._fixed:
            raise ServeError(
                Code.FAILED_PRECONDITION,
                f"model '{name}' was given with --model, which calls do not change",
            )
        return self._manager

    async def _make_change(
        self, manager: RepositoryManager, name: str, make: Callable[[Situation], Change]
    ) -> None:
        async with self._turn():
            await self._change_model(manager, name, make)

    async def _change_model(
        self, manager: RepositoryManager, name: str, make: Callable[[Situation], Change]
    ) -> None:
        model = await self._read(manager, name)
        try:
            change = make(model.situation())
            model.forgive(change.load)
            model.asked = change.load
            manager.wake()
            await self._load_all(manager, model, change.load)
            await self._record(model, change)
        except RefusedChangeError as error:
            raise ServeError(Code(error.refusal.value), error.message) from None
        finally:
            model.asked = None
            model.decide()
            manager.publish(model)
            manager.wake()
        await self._unload(manager, model, change)

    async def _read(self, manager: RepositoryManager, name: str) -> ModelVersions:
        """Read the model's folder again."""
        try:
            reading = await in_thread(lambda: read_model(manager.repositories, name))
        except UserError as error:
            raise ServeError(Code.FAILED_PRECONDITION, str(error)) from error
        if reading is None:
            known = ", ".join(f"'{one}'" for one in sorted(manager.models)) or "none"
            raise ServeError(
                Code.NOT_FOUND, f"model '{name}' is in no repository; there are {known}"
            )
        model = manager.models.setdefault(name, ModelVersions(name))
        # What was wanted before is not changed by the reading alone: the call may yet be refused.
        model.asked = frozenset()
        model.take(reading)
        if reading.errors or model.settings is None or model.record is None:
            model.asked = None
            manager.publish(model)
            raise ServeError(Code.FAILED_PRECONDITION, "; ".join(reading.errors))
        return model

    async def _load_all(
        self, manager: RepositoryManager, model: ModelVersions, versions: frozenset[int]
    ) -> None:
        for version in sorted(versions):

            def ended(version: int = version) -> bool:
                file = model.folder and model.folder.versions.get(version)
                status = model.statuses.get(version)
                if file is None:
                    return True
                return status is not None and file in {status.file, status.failed_file}

            await manager.until(ended)
            if version not in model.live or version in model.reasons:
                reason = model.reasons.get(version, "it is not in its folder")
                raise ServeError(
                    Code.FAILED_PRECONDITION,
                    f"version '{version}' of model '{model.name}' could not be loaded: {reason}",
                )

    async def _record(self, model: ModelVersions, change: Change) -> None:
        assert model.folder is not None
        folder = model.folder.path
        try:
            await in_thread(lambda: write_control(folder, change.record))
        except UserError as error:
            raise ServeError(Code.FAILED_PRECONDITION, str(error)) from error
        model.record = change.record
        if change.drop in model.statuses:
            model.statuses[change.drop] = replace(model.statuses[change.drop], dropped=True)

    async def _unload(
        self, manager: RepositoryManager, model: ModelVersions, change: Change
    ) -> None:
        """Wait until what was asked to go has gone."""

        def gone() -> bool:
            left = {*model.live, *(version for version, _ in model.retiring), model.loading}
            left.discard(None)
            return not left if change.record.unloaded else change.drop not in left

        await manager.until(gone)
