"""Loads a version beside the versions that answer: what takes long with pauses, or in another process."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from tessera.serving.package.archive import file_identity
from tessera.serving.package.handover import CheckedContents, take_others
from tessera.serving.package.hashes import FileHash
from tessera.serving.package.loading import LoadedPackage, Loading
from tessera.serving.package.pace import ASIDE_NICENESS, Pace, load_pace, no_rest
from tessera.serving.package.signed_record import unsigned_sha256
from tessera.serving.package.table_memory import TableMemory
from tessera.serving.server.config import ServerConfig
from tessera.serving.server.follow.commit_reader import CommitReader
from tessera.serving.server.follow.followed_model import FollowedModel
from tessera.serving.server.model.loader import (
    LoadedModel,
    ModelOrigin,
    PackageLoader,
    loaded_model,
)
from tessera.serving.server.named_thread import NamedThread
from tessera.serving.server.repository.checker import CheckOptions, PackageChecker
from tessera.serving.server.repository.kept_models import MOST_OWN_BYTES, KeptModels
from tessera.serving.server.repository.spare_memory import SPARE_S, SpareMemory

_Result = TypeVar("_Result")


class VersionLoader(Protocol):
    """What the server needs of a source of versions; the calls block."""

    def load(
        self, path: Path, progress: Callable[[float], None], *, beside_others: bool
    ) -> LoadedModel:
        """The model in the package ``path``.

        Args:
            path: the file.
            progress: told how much of the work is done, from 0 to 1.
            beside_others: whether other versions answer meanwhile, for which this work stands back.

        Raises:
            UserError: the package cannot be served.
        """
        ...

    def keep(self, model: LoadedModel) -> None:
        """``model``, which was loaded and which the caller alone refers to, is used no more: it may be kept for a later load."""
        ...

    def release(self) -> None:
        """A model that was loaded is used no more, and nobody refers to it unless it is kept."""
        ...

    def commit_reader(self) -> CommitReader | None:
        """What reads commits for the loaded models; None: they are read in this process."""
        ...


class PackageVersionLoader:
    """Loads package files.

    Args:
        config: says what packages must be.
        checker: checks packages for CPUs in processes of their own; None: they are checked in this one.
    """

    def __init__(self, config: ServerConfig, checker: PackageChecker | None) -> None:
        self._config = config
        self._checker = checker
        self._memory = TableMemory(SpareMemory(SPARE_S))
        self._kept = KeptModels(self._memory, SPARE_S)
        self._packages = PackageLoader.of(config)

    def load(
        self, path: Path, progress: Callable[[float], None], *, beside_others: bool
    ) -> LoadedModel:
        """See `VersionLoader.load`."""
        begin = time.perf_counter()
        kept = at_priority(ASIDE_NICENESS if beside_others else 0, lambda: self._find_kept(path))
        if kept is not None:
            return replace(kept, load_seconds=time.perf_counter() - begin)
        with self._kept.loading():
            return self._load(path, progress, begin, beside_others=beside_others)

    def _find_kept(self, path: Path) -> LoadedModel | None:
        try:
            file = file_identity(path)
        except OSError:  # which the load tells of
            return None
        return self._kept.take(file)

    def _load(
        self, path: Path, progress: Callable[[float], None], begin: float, *, beside_others: bool
    ) -> LoadedModel:
        packages: list[LoadedPackage] = []
        names: list[str] = []
        memory: list[Mapping[str, Sequence[Tensor]]] = []
        follow = self._config.follow
        for devices in self._packages.replica_devices(path):
            loading = Loading(
                path,
                devices=devices,
                trusted_keys=self._packages.trusted_keys,
                allow_ops=self._config.allow_ops,
                # Commits change tables: those of a followed version are its own.
                memory=None if follow else self._memory,
                patchable=follow,
            )
            reading = _Reading(loading, self._checker, progress, beside_others=beside_others)
            checked = reading.read()
            torch.set_num_threads(1)  # of this thread; OpenMP's would spin
            loading.open(reading.rest())
            reading.read_tables()
            loading.build(reading.rest())
            # Calls of the model give way to others as those of inference do.
            golden = self._config.verify_golden and not checked
            at_priority(
                self._config.limits.worker_niceness,
                lambda loading=loading, reading=reading, golden=golden: loading.settle(  # type: ignore[misc] # mypy cannot infer a lambda with defaults
                    verify_golden=golden, rest=reading.rest()
                ),
            )
            file_hash = packages[0].file_hash if packages else self._file_hash(loading)
            packages.append(loading.package(file_hash, time.perf_counter() - begin))
            names.append(devices[0] if devices else packages[-1].manifest.device)
            memory.append(loading.patchable_memory() if follow else {})
        loaded = loaded_model(packages, names)
        if not follow:
            return replace(loaded, origin=_origin(loading))
        return replace(loaded, followed=self._followed(packages, memory, loading))

    def _followed(
        self,
        packages: Sequence[LoadedPackage],
        memory: Sequence[Mapping[str, Sequence[Tensor]]],
        last: Loading,
    ) -> FollowedModel:
        records, manifest = packages[0].records, packages[0].manifest
        # The rows of a table that is cut over shards are gathered by operators of torch.
        overlays = manifest.backend == "tessera" and manifest.plan.num_shards == 1
        return FollowedModel(
            runners=[package.runner for package in packages],
            memory=memory,
            sizes={entry.name: entry.bytes for entry in records.entries},
            base=unsigned_sha256(records.manifest_bytes()),
            verify_golden=self._config.verify_golden,
            overlays=overlays,
            second=last.second() if overlays and set(last.devices) == {"cpu"} else None,
        )

    def _file_hash(self, loading: Loading) -> FileHash:
        checker, path = self._checker, loading.path
        if checker is None:
            return loading.hash_again()
        return FileHash(lambda: checker.file_sha256(path))

    def keep(self, model: LoadedModel) -> None:
        """See `VersionLoader.keep`."""
        self._kept.keep(model)

    def release(self) -> None:
        """Give the system what malloc has left of a model; its tables have gone already."""
        with contextlib.suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)

    def commit_reader(self) -> CommitReader | None:
        """See `VersionLoader.commit_reader`."""
        return None if self._checker is None else self._checker.commit_reader()


def _origin(loading: Loading) -> ModelOrigin | None:
    """What the model of ``loading`` can be kept with."""
    tables, records = loading.opening.tables(), loading.records
    own = sum(entry.bytes for entry in records.entries) - sum(table.numel() for table in tables)
    if not loading.on_host or own > MOST_OWN_BYTES:
        return None
    return ModelOrigin(file=records.identity, tables=tables)


class _Reading:
    """The steps of a load that read the file; each takes its time, and none is the package's own code.

    Args:
        loading: the load.
        checker: see `PackageVersionLoader`.
        progress: see `VersionLoader.load`.
        beside_others: see `VersionLoader.load`.
    """

    def __init__(
        self,
        loading: Loading,
        checker: PackageChecker | None,
        progress: Callable[[float], None],
        *,
        beside_others: bool,
    ) -> None:
        self._loading = loading
        self._device = loading.manifest.device
        self._checker = checker if self._device == "cpu" else None
        self._progress = progress
        self._beside_others = beside_others
        readings = 1 if self._checker is None else 2  # in the process that checks, and then from it
        self._total = readings * max(sum(entry.bytes for entry in loading.records.entries), 1)
        self._done = 0
        self._lock = threading.Lock()

    def read(self) -> bool:
        """Read the package but for tables for GPUs; returns whether another process has run the model."""
        loading = self._loading
        if self._checker is None:
            self._aside(lambda: loading.read(self._add))
            loading.opening.offer()
            return False
        manifest_sha256 = hashlib.sha256(loading.records.manifest_bytes()).hexdigest()
        if self._checker.has_run(manifest_sha256) and self._shares_all():
            self._aside(lambda: take_others(loading.records, loading.opening, self._add))
            return True
        with self._checker.check(
            loading.path, manifest_sha256, self._add, beside_others=self._beside_others
        ) as contents:
            at_priority(self._niceness, lambda: self._take(contents))
        return True

    def _shares_all(self) -> bool:
        """Take the tables that are in memory; returns whether these are all large ones."""
        at_priority(self._niceness, self._loading.opening.share)
        return self._loading.opening.shares_all()

    def _take(self, contents: CheckedContents) -> None:
        opening = self._loading.opening
        contents.take(self._loading.records, opening, self._add, self._pace())
        opening.offer()

    def read_tables(self) -> None:
        """Read tables for GPUs, where there are some; the module is open."""
        if not self._loading.on_host:
            self._aside(lambda: self._loading.read_tables(self._add))

    def _aside(self, read: Callable[[], None]) -> None:
        def body() -> None:
            self._loading.records.pace = self._pace()
            read()

        at_priority(self._niceness, body)

    @property
    def _niceness(self) -> int:
        return ASIDE_NICENESS if self._beside_others else 0

    def _pace(self) -> Pace | None:
        """The pauses of the calling thread."""
        return load_pace(self._device) if self._beside_others else None

    def rest(self) -> Callable[[], None]:
        """What the calling thread pauses with."""
        pace = self._pace()
        return no_rest if pace is None else pace.rest

    def _add(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._progress(min(self._done / self._total, 1.0))


def check_options(config: ServerConfig) -> CheckOptions:
    """How a `PackageChecker` checks the packages of a server.

    Raises:
        UserError: a file with a public key cannot be read.
    """
    return CheckOptions(
        verify_golden=config.verify_golden,
        allow_ops=config.allow_ops,
        trusted_keys=PackageLoader.of(config).trusted_keys,
        load_timeout_s=config.load_timeout_s,
    )


def at_priority(niceness: int, work: Callable[[], _Result]) -> _Result:
    """``work()`` on a thread that stands back by ``niceness`` for others, whose end is waited for."""
    results: list[_Result] = []
    failures: list[BaseException] = []

    def body() -> None:
        # Linux gives threads a niceness of their own; elsewhere the thread runs as it is.
        with contextlib.suppress(OSError):
            this = threading.get_native_id()
            own = os.getpriority(os.PRIO_PROCESS, this)
            os.setpriority(os.PRIO_PROCESS, this, own + niceness)
        torch.set_num_threads(1)
        try:
            results.append(work())
        except BaseException as failure:  # noqa: BLE001 - raised below, in the caller's thread
            failures.append(failure)

    thread = NamedThread(target=body, name="aside", daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]
