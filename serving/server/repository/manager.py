"""Keeps the versions that a server has loaded equal to those that its repositories want.

Everything here runs on the event loop's thread but for reading folders and loading, which have threads of their
own.  One version is loaded at a time.  A version is published by one pointer, and retires once the calls that it
has accepted are answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tessera.errors import UserError
from tessera.serving.package.pace import stand_aside
from tessera.serving.repository.folder import Fingerprint
from tessera.serving.server.config import ServerConfig
from tessera.serving.server.daemon_thread import in_thread
from tessera.serving.server.errors import Code, ServeError
from tessera.serving.server.follow.version_log import Step, VersionLog
from tessera.serving.server.front.health_service import HealthService, Serving
from tessera.serving.server.front.recent_requests import RecentRequests, warm_up_with
from tessera.serving.server.metrics.counted_names import CountedNames
from tessera.serving.server.metrics.metrics_page import MetricsPage
from tessera.serving.server.metrics.model_metrics import ModelMetrics
from tessera.serving.server.model.loader import LoadedModel
from tessera.serving.server.model.registry import Registry, VersionedModel
from tessera.serving.server.model.served_model import ServedModel
from tessera.serving.server.model.serving import serve_model
from tessera.serving.server.repository.following import Following
from tessera.serving.server.repository.model_versions import IndexRow, LiveVersion, ModelVersions
from tessera.serving.server.repository.reading import (
    Reading,
    check_readable,
    read_repositories,
)
from tessera.serving.server.repository.version_loader import VersionLoader

_Replayed = tuple[VersionLog | None, list[Step]]
"""The log that a version follows, and what was done of it before the version answers."""

_END_OF_WORKERS_S = 60.0
"""What the batches of a version may take that nobody waits for any more."""


class RepositoryManager:
    """The repositories of one server.

    Args:
        config: names the repositories, and how they change.
        registry: where versions are published.
        metrics: shows the versions' counters.
        health: told which models answer.
        loader: where versions come from.
        recent: the requests that a version is called with before it answers.
        log: where it tells what it does.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        config: ServerConfig,
        registry: Registry,
        metrics: MetricsPage,
        health: HealthService,
        loader: VersionLoader,
        recent: RecentRequests,
        log: Any,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.repositories = tuple(Path(path) for path in config.model_repositories)
        self.models: dict[str, ModelVersions] = {}
        self._config = config
        self._registry = registry
        self._metrics = metrics
        self._health = health
        self._loader = loader
        self._recent = recent
        self._log = log
        self._clock = clock
        self._polls = config.model_control == "poll"
        self.following = self._follow() if config.follow else None
        self._taken = frozenset(name for name, _ in registry.fixed())
        self._counters: dict[tuple[str, int], ModelMetrics] = {}
        self._told: frozenset[str] = frozenset()
        self._closed = False
        self._rescan = asyncio.Event()
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._releases: set[asyncio.Task[None]] = set()

    # Its life.

    async def start(self) -> None:
        """Read the repositories, and return when each load of the start has ended.

        Raises:
            UserError: a repository cannot be read.
        """
        for path in self.repositories:
            await in_thread(lambda path=path: check_readable(path))  # type: ignore[misc] # mypy cannot infer a lambda with defaults
        self._take(await in_thread(lambda: read_repositories(self.repositories, self._taken)))
        loop = asyncio.get_running_loop()
        self._tasks.append(loop.create_task(self._work()))
        await self._idle.wait()
        self._tasks.append(loop.create_task(self._read_again()))

    async def close(self) -> None:
        """Begin nothing any more."""
        self._closed = True
        if self.following is not None:
            self.following.close()
        self._tell_changed()
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def rescan(self) -> None:
        """Read the repositories now, whatever ``model_control`` is."""
        self._rescan.set()

    async def _read_again(self) -> None:
        wait = self._config.poll_s if self._polls else None
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._rescan.wait(), wait)
            self._rescan.clear()
            self._take(await in_thread(lambda: read_repositories(self.repositories, self._taken)))

    def _take(self, reading: Reading) -> None:
        """Know what was read of all repositories."""
        for remark in sorted(set(reading.remarks) - self._told):
            self._log.warning("repository", remark=remark)
        self._told = frozenset(reading.remarks)
        for name, model_reading in reading.models.items():
            self.models.setdefault(name, ModelVersions(name)).take(model_reading)
        for name, model in self.models.items():
            folder = model.folder
            if name not in reading.models and folder is not None:
                # Nothing is known of what cannot be read, so nothing changes.
                unknown = folder.path.parent in reading.unreadable or folder.path.is_dir()
                if not unknown:
                    model.take(None)
        for model in list(self.models.values()):
            self.publish(model)
        self._wake.set()

    # One thing after the other.

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            again = math.inf
            load: tuple[ModelVersions, int] | None = None
            # A model that does not answer yet comes first.
            for model in sorted(self.models.values(), key=lambda one: (bool(one.live), one.name)):
                plan = model.plan(retry=self._polls, now=self._clock())
                for version in sorted(plan.retire):
                    self._retire(model, version)
                again = min(again, plan.again)
                if load is None and plan.load is not None:
                    load = model, plan.load
            if load is not None:
                await self._load_if_it_fits(*load)
                continue
            self._tell_changed()
            self._idle.set()
            with contextlib.suppress(asyncio.TimeoutError):
                wait = None if math.isinf(again) else max(0.0, again - self._clock())
                await asyncio.wait_for(self._wake.wait(), wait)

    async def _load_if_it_fits(self, model: ModelVersions, version: int) -> None:
        limit = self._config.max_model_bytes
        file = _file(model, version)
        held = self._held_bytes()
        if not limit or held + file.bytes <= limit:
            await self._load(model, version, file)
        elif self._releases:
            await asyncio.wait(self._releases, return_when=asyncio.FIRST_COMPLETED)
        else:
            assert model.folder is not None
            reason = (
                f"package {model.folder.package(version)}: has {file.bytes} bytes, loaded versions have {held}; "
                f"together that is more than --max-model-bytes {limit}; unload a version or allow more"
            )
            self._fail(model, version, file, reason)

    def _held_bytes(self) -> int:
        files = [live.file for model in self.models.values() for live in model.live.values()]
        files += [file for model in self.models.values() for _, file in model.retiring]
        return sum(file.bytes for file in files)

    async def _load(self, model: ModelVersions, version: int, file: Fingerprint) -> None:
        assert model.folder is not None
        path = model.folder.package(version)
        model.loading, model.progress = version, 0.0
        self.publish(model)
        log = self._log.bind(model=model.name, version=str(version))
        log.info("load", path=str(path))
        # Nobody is promised an answer before the loads of the start have ended.
        beside_others = self._idle.is_set() and any(True for _ in self._registry.loaded())

        def progress(done: float) -> None:
            model.progress = done

        try:
            loaded = await in_thread(
                lambda: self._loader.load(path, progress, beside_others=beside_others)
            )
            replayed = await self._replay(model, version, path, loaded)
            served = self._prepare(model, version, loaded, path)
            await self._warm_up(model.name, served)
            self._metrics.versions.count_load(model.name, ok=True)
            live = LiveVersion(served, loaded, file, replayed[0])
            if model.was_unloaded(version):
                # Where another wanted version is not ready, nothing would retire it.
                model.retiring.append((version, file))
                self._release_at_end(model, version, live)
            else:
                self._serve(model, version, live, replayed[1])
        except UserError as error:
            self._fail(model, version, file, str(error))
        except Exception as error:
            log.error("load_raised", exc_info=(type(error), error, error.__traceback__))  # noqa: TRY400 - as everywhere in the log
            self._fail(model, version, file, f"package {path}: cannot be loaded: {error!r}")
        else:
            log.info("loaded", seconds=round(loaded.load_seconds, 3))
            loaded.file_hash.tell(
                lambda sha256: log.info("file_hash", sha256=sha256),
                lambda failure: log.warning("file_hash_failed", error=str(failure)),
            )
        finally:
            model.loading = None
            self.publish(model)

    # Logs of commits.

    def _follow(self) -> Following:
        return Following(
            config=self._config,
            reader=self._loader.commit_reader(),
            metrics=self._metrics.versions.follow,
            log=self._log,
            changed=self._tell_changed,
            reload=self._load_again,
        )

    async def _replay(
        self, model: ModelVersions, version: int, path: Path, loaded: LoadedModel
    ) -> _Replayed:
        following, followed = self.following, loaded.followed
        if following is None or followed is None:
            return None, []
        return await in_thread(lambda: following.replay(model.name, version, path.parent, followed))

    def _follow_no_more(self, live: LiveVersion) -> None:
        if self.following is not None and live.log is not None:
            self.following.end(live.log)

    def _load_again(self, log: VersionLog) -> None:
        """Load the version of ``log`` anew: it has to go back further than memory reaches."""
        model = self.models.get(log.model)
        live = None if model is None else model.live.get(log.version)
        if model is not None and live is not None and live.log is log:
            model.load_again(log.version)
            self._wake.set()

    def _fail(self, model: ModelVersions, version: int, file: Fingerprint, reason: str) -> None:
        model.failed(version, file, reason, self._clock())
        self._metrics.versions.count_load(model.name, ok=False)
        self._log.error(
            "load_failed",
            model=model.name,
            version=str(version),
            error=reason,
            failures=model.statuses[version].failures,
        )
        self.publish(model)

    async def _warm_up(self, model: str, served: ServedModel) -> None:
        """Call a version with some of the last requests of its model before it answers."""
        if sample := self._recent.of(model):
            counts = await warm_up_with(sample, served)
            self._log.info("warmed_up", model=model, version=served.version, **asdict(counts))

    def _prepare(
        self, model: ModelVersions, version: int, loaded: LoadedModel, path: Path
    ) -> ServedModel:
        counted = CountedNames.of(loaded.schema)
        counters = self._counters.get((model.name, version))
        if counters is None or counters.names != counted:
            if counters is not None:
                self._metrics.remove(counters)
            counters = ModelMetrics(model.name, str(version), counted)
            self._counters[model.name, version] = counters
            self._metrics.add(counters)
        limits = self._config.limits_of(model.settings.batching if model.settings else {})
        return serve_model(loaded, str(path), counters, limits, self._log)

    def _serve(
        self,
        model: ModelVersions,
        version: int,
        live: LiveVersion,
        steps: list[Step],
    ) -> None:
        live.served.metrics.ready = True
        before = model.succeeded(version, live)
        if self.following is not None and live.log is not None:
            self.following.begin(live.log, steps)
        self.publish(model)
        if before is not None:
            self._follow_no_more(before)
            model.retiring.append((version, before.file))
            self._release_at_end(model, version, before)

    def _retire(self, model: ModelVersions, version: int) -> None:
        live = model.retire(version)
        self._follow_no_more(live)
        live.served.metrics.ready = False
        self._log.info("unload", model=model.name, version=str(version))
        self.publish(model)
        self._release_at_end(model, version, live)

    def _release_at_end(self, model: ModelVersions, version: int, live: LiveVersion) -> None:
        """Let go of ``live`` when the last call that it has accepted is answered."""
        ended = asyncio.Event()
        live.served.calls.at_end(ended.set)
        task = asyncio.ensure_future(self._release(model, version, live, ended))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(
        self, model: ModelVersions, version: int, live: LiveVersion, ended: asyncio.Event
    ) -> None:
        await ended.wait()
        holder = [live]
        if version not in model.live:
            live.served.metrics.unload()
        file = live.file
        del live
        # On its own thread, which is the last to refer to the model: memory goes back from there.
        await in_thread(lambda: _let_go(holder, self._loader))
        model.retiring.remove((version, file))
        self._log.info("unloaded", model=model.name, version=str(version))
        self.publish(model)
        self._wake.set()

    # What others see.

    def publish(self, model: ModelVersions) -> None:
        """Let requests, health and metrics see ``model`` as it is now; forget it where nothing is left of it."""
        gone = model.folder is None and not model.live and not model.retiring
        if gone:
            self.models.pop(model.name, None)
            self._registry.withdraw(model.name)
            self._health.remove(model.name)
            self._recent.forget(model.name)
        else:
            served = {version: live.served for version, live in model.live.items()}
            self._registry.publish(model.name, VersionedModel(model.routes(), served))
            state = Serving.SERVING if served else Serving.NOT_SERVING
            self._health.set(model.name, state)
        kept = model.present | set(model.live) | {version for version, _ in model.retiring}
        for name, version in list(self._counters):
            if name == model.name and version not in kept:
                self._metrics.remove(self._counters.pop((name, version)))
        self._tell_changed()

    def _tell_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return when ``holds()``, which is asked whenever something has changed.

        Raises:
            ServeError: UNAVAILABLE, the server drains.
        """
        while not holds():
            if self._closed:
                raise ServeError(Code.UNAVAILABLE, "the server is draining")
            await self._changed.wait()

    def wake(self) -> None:
        """Look again at what is to be done."""
        self._wake.set()

    def index(self) -> list[IndexRow]:
        """Every version of every model of the repositories."""
        return [row for _, model in sorted(self.models.items()) for row in model.index()]


def _file(model: ModelVersions, version: int) -> Fingerprint:
    assert model.folder is not None
    return model.folder.versions[version]


def _let_go(holder: list[LiveVersion], loader: VersionLoader) -> None:
    stand_aside()
    live = holder.pop()
    ended = live.served.scheduler.close(_END_OF_WORKERS_S)
    live.served.scheduler.forget()
    if ended:
        loader.keep(live.loaded)
    del live
    loader.release()
