"""Prepared folders: derived files that are either whole and current, or not there.

A prepared folder holds what a reader made of its source files, and a ``manifest.json`` that was
written last:

    <cache_dir>/<label>-<identity>-<state>/     one folder per state of the sources
        manifest.json                           format, sources, options, files with their sizes, and
                                                a digest of these
        ...                                     the reader's files
    <cache_dir>/.<label>-<identity>.tmp/        one that is being made
    <cache_dir>/.<label>-<identity>.lock        held (flock) by the process that makes it

``identity`` is a hash of the sources' paths and the options, ``state`` one of the sources' sizes and
modification times and the format's version, so a changed source leads to another folder and the
old one is removed.  A folder is made under its temporary name, every file is flushed to the disk
(fsync), the manifest after the others, and then renamed; a process that is killed leaves only a
temporary folder, which the next one to hold the lock removes.  Of several processes that want the
same folder one makes it and the others wait.  Opening compares every file's size with the manifest, and the manifest with its
digest; a folder that lost something is reported and made again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from tessera.durable import sync
from tessera.errors import UserError

FORMAT_VERSION = 2
MANIFEST = "manifest.json"

_log = logging.getLogger("tessera.data")


@dataclass(frozen=True)
class PreparedFolder:
    """A whole prepared folder.

    Attributes:
        path: the folder.
        details: what the reader's ``build`` returned, as JSON gave it back.
    """

    path: Path
    details: dict[str, Any]


class State(Protocol):
    """What tells one state of a source from another; `os.stat_result` is one."""

    @property
    def st_size(self) -> int:
        """Bytes."""

    @property
    def st_mtime_ns(self) -> int:
        """The time of its last change."""


class RemoteSource(Protocol):
    """A source on another machine."""

    def absolute(self) -> object:
        """Itself; as text its URL."""

    def stat(self) -> State:
        """Its state when it was found."""

    def now(self) -> State:
        """Its state as it is now."""


class SourceChangedError(UserError):
    """A source file changed while it was being read."""


def open_or_build(
    cache_dir: Path,
    *,
    label: str,
    sources: Sequence[Path | RemoteSource],
    options: Mapping[str, Any],
    build: Callable[[Path], Mapping[str, Any]],
) -> PreparedFolder:
    """The prepared folder of ``sources``, made by ``build`` if it is not there yet.

    Args:
        cache_dir: where prepared folders lie; made if needed.
        label: begins the folder's name, for people; any text.
        sources: every file whose change makes the folder stale.
        options: everything else that the files depend on; JSON values.
        build: writes files into the empty folder that it is given and returns JSON values to
            keep in the manifest.

    Raises:
        UserError: ``cache_dir`` cannot be written to, is full, or a source changed meanwhile;
            and whatever ``build`` raises.
    """
    before = _describe(sources)
    name = re.sub(r"[^A-Za-z0-9._]+", "_", label)[:60]
    identity = _digest([[entry["path"] for entry in before], dict(options)])
    folder = cache_dir / f"{name}-{identity}-{_digest([FORMAT_VERSION, before])}"
    if (found := _open(folder)) is not None:
        return found
    stem = f".{name}-{identity}"
    try:
        with _locked(cache_dir / f"{stem}.lock"):
            if (found := _open(folder)) is not None:
                return found
            with _temporary(cache_dir / f"{stem}.tmp") as temporary:
                details = dict(build(temporary))
                if _describe(sources, now=True) != before:
                    names = ", ".join(map(str, sources))
                    raise SourceChangedError(f"{names}: changed while being read; run again")
                _seal(temporary, sources=before, options=options, details=details)
                _remove_others(cache_dir, f"{name}-{identity}-")
                temporary.rename(folder)
                sync(cache_dir)
    except OSError as error:
        raise _unwritable(cache_dir, error) from error
    found = _open(folder)
    assert found is not None
    return found


def _unwritable(cache_dir: Path, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what, remedy = "no space left for the prepared data", "free some"
    else:
        what, remedy = f"cannot be written to ({error.strerror})", "make it writable"
    return UserError(f"cache_dir='{cache_dir}': {what}; {remedy}, or name another folder")


def _describe(sources: Sequence[Path | RemoteSource], *, now: bool = False) -> list[dict[str, Any]]:
    described = []
    for source in sources:
        try:
            looks = now and not isinstance(source, Path)
            stat: State = source.now() if looks else source.stat()  # type: ignore[union-attr] # no Path then
        except OSError as error:
            raise UserError(f"path='{source}': {error.strerror}; name a readable file") from error
        described.append(
            {"path": str(source.absolute()), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        )
    return described


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _open(folder: Path) -> PreparedFolder | None:
    """The folder if it is there and whole."""
    if not folder.exists():
        return None
    details: dict[str, Any] = {}
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if _is_sealed(manifest):
            details = manifest["details"]
            damage = _damage(folder, manifest["files"])
        else:
            damage = f"its {MANIFEST} is not the one that was written"
    except (FileNotFoundError, ValueError, RecursionError) as error:
        damage = f"its {MANIFEST} cannot be read ({error})"
    if damage:
        _log.warning("%s: %s; preparing the data again", folder, damage)
        return None
    return PreparedFolder(folder, details)


def _is_sealed(manifest: Any) -> bool:
    """Whether this is what `_seal` wrote, unchanged."""
    if not isinstance(manifest, dict):
        return False
    content = {name: value for name, value in manifest.items() if name != "digest"}
    return bool(manifest.get("digest") == _digest(content))


def _damage(folder: Path, sizes: Mapping[str, int]) -> str | None:
    for name, size in sizes.items():
        file = folder / name
        found = file.stat().st_size if file.exists() else 0
        if not file.exists() or found != size:
            return f"{name} has {found} bytes instead of {size}"
    return None


def _seal(
    folder: Path,
    *,
    sources: list[dict[str, Any]],
    options: Mapping[str, Any],
    details: Mapping[str, Any],
) -> None:
    """Flush every file, then write the manifest and flush that."""
    files = sorted(path for path in folder.iterdir())
    for file in files:
        sync(file)
    manifest = {
        "format": "tessera prepared data",
        "version": FORMAT_VERSION,
        "sources": sources,
        "options": dict(options),
        "files": {file.name: file.stat().st_size for file in files},
        "details": details,
    }
    manifest = json.loads(json.dumps(manifest))  # as it will be read
    path = folder / MANIFEST
    sealed = {**manifest, "digest": _digest(manifest)}
    path.write_text(json.dumps(sealed, indent=1), encoding="utf-8")
    sync(path)
    sync(folder)


def _remove_others(cache_dir: Path, prefix: str) -> None:
    """Remove this identity's folders: stale ones, and a damaged one of the same state.

    A process that still reads one keeps its mapped files until it closes them.
    """
    for other in cache_dir.glob(f"{prefix}*"):
        shutil.rmtree(other)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """An empty folder, removed at the end unless it was renamed."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file; the system releases it when this process ends, however it ends.

    Where the folder of the file was made for it and the block fails, both are removed again.
    """
    made = not path.parent.exists()
    with _open_locked(path):
        try:
            yield
        except BaseException:
            if made:
                path.unlink()
                with contextlib.suppress(OSError):  # somebody else has put something into it
                    path.parent.rmdir()
            raise


def _open_locked(path: Path) -> IO[str]:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
        # The process that held it before may have removed it: then the name is free again.
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return file
        file.close()
