"""Files that URLs name: through pyarrow's file systems, and fsspec's where pyarrow has none.

A remote file has the few methods of a `pathlib.Path` that readers use, so that both are read alike.
Which file systems this was tested with is said in docs/your-data.md.
"""

from __future__ import annotations

import fnmatch
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast
from urllib.parse import quote

import pyarrow as pa
import pyarrow.fs as pa_fs

from tessera.errors import UserError
from tessera.training.data.urls import URL

_OF_ARROW = ("s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")
_OF_BUCKETS = ("s3://", "gs://", "gcs://")
_BUFFER_BYTES = 4 << 20
_MOST_REASON = 200

_ABSENT = ("NO_SUCH_BUCKET", "NoSuchBucket", "bucket does not exist")
_FORBIDDEN = (
    *("ACCESS_DENIED", "AccessDenied", "INVALID_ACCESS_KEY_ID", "InvalidAccessKeyId"),
    *("SIGNATURE_DOES_NOT_MATCH", "SignatureDoesNotMatch", "INVALID_CLIENT_TOKEN_ID"),
    *("HTTP status 403", "PERMISSION_DENIED", "UNAUTHENTICATED", "Permission denied"),
)
_UNREACHABLE = (
    *("NETWORK_CONNECTION", "UNAVAILABLE", "Could not connect", "Could not resolve"),
    *("Connection refused", "Cannot connect", "timed out", "Timeout"),
)

T = TypeVar("T")


class FileStat(NamedTuple):
    """What is known of a remote file without reading it; names and units are those of `os.stat`."""

    st_size: int
    st_mtime_ns: int


@dataclass(frozen=True)
class RemoteFile:
    """A file of a remote file system, as it was when it was found.

    Attributes:
        url: how messages and configs name it, without options.
        place: where it is in its file system.
        system: the file system, pyarrow's.
        found: its size and time of change.
    """

    url: str
    place: str
    system: Any = field(compare=False, repr=False)
    found: FileStat

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of its URL."""
        return self.url.rpartition("/")[2]

    def absolute(self) -> RemoteFile:
        """The file itself: a URL does not depend on the working directory."""
        return self

    def stat(self) -> FileStat:
        """Its size and time of change as they were when it was found."""
        return self.found

    def now(self) -> FileStat:
        """The same as they are now.

        Raises:
            UserError: the file is gone, or cannot be looked at.
        """
        info = told(self.url, lambda: self.system.get_file_info(self.place))
        if info.type != pa_fs.FileType.File:
            raise remote_error(self.url, FileNotFoundError())
        return _stat(info)

    def arrow_file(self) -> Any:
        """The file as pyarrow reads it, at any place.

        Raises:
            OSError: it cannot be opened.
        """
        opened = self.system.open_input_file(self.place)
        if opened.size() != self.found.st_size:
            raise OSError(
                f"it has {opened.size()} bytes, and had {self.found.st_size} when it was found"
            )
        return opened

    def open(self, mode: str = "rb") -> BinaryIO:
        """The file's bytes, buffered.

        Raises:
            OSError: it cannot be opened.
        """
        assert mode == "rb", "remote files are only read"
        return cast("BinaryIO", io.BufferedReader(self.arrow_file(), _BUFFER_BYTES))


Location = Path | RemoteFile


def arrow_source(location: Location) -> Any:
    """What pyarrow's readers of Parquet take: a path, or an open remote file."""
    return location.arrow_file() if isinstance(location, RemoteFile) else location


def random_access(location: Location) -> Any:
    """The file as pyarrow reads it at any place, a local one mapped into memory."""
    if isinstance(location, RemoteFile):
        return location.arrow_file()
    return pa.memory_map(str(location))


def remote_error(url: str, error: Exception) -> UserError:
    """The one line that says why a remote file cannot be read."""
    text = str(error)
    reason = (text.splitlines() or [type(error).__name__])[0]
    details = reason.partition("; Details: ")[2] or reason
    if isinstance(error, FileNotFoundError):
        return UserError(f"{url}: is not there; name a file that is, or put it back")
    if any(word in text for word in _ABSENT):
        return UserError(f"{url}: there is no such bucket; name one that is there")
    if isinstance(error, PermissionError) or any(word in text for word in _FORBIDDEN):
        return UserError(
            f"{url}: the server gives no permission ({reason[:_MOST_REASON]}); give credentials that"
            " may read it, by the environment variables of the file system"
        )
    if isinstance(error, ConnectionError) or any(word in text for word in _UNREACHABLE):
        return UserError(
            f"{url}: its server cannot be reached ({details[:_MOST_REASON]}); see that it runs and"
            " that the endpoint is right (AWS_ENDPOINT_URL, or endpoint_override in the URL)"
        )
    return UserError(
        f"{url}: cannot be read: {reason[:_MOST_REASON]}; mend the file or leave it out"
    )


def told(url: str, work: Callable[[], T]) -> T:
    """What ``work`` gives; whatever a file system raises is a `UserError` in one line."""
    try:
        return work()
    except (OSError, pa.ArrowException, ImportError, ValueError, RuntimeError) as error:
        raise remote_error(url, error) from error


@dataclass(frozen=True)
class Listing:
    """The files that a URL stands for.

    Attributes:
        files: each with the names of the folders below ``root`` that it is in, and its own.
        kind: what the URL names.
    """

    files: list[tuple[RemoteFile, tuple[str, ...]]]
    kind: str


def list_url(url: str) -> Listing:
    """The files that a URL stands for: one, all below a folder, or those that a pattern fits.

    The files are in the order of their paths, as those of a local folder are.

    Raises:
        UserError: the URL or its file system is not known, or cannot be looked at.
    """
    shown = url.partition("?")[0]
    fixed, pattern, options = _parts(url)
    system, place = told(shown, lambda: _system(fixed, options))
    place = place.rstrip("/")
    base = fixed.rstrip("/")

    def file(info: Any) -> tuple[RemoteFile, tuple[str, ...]]:
        inside = info.path[len(place) :].strip("/")
        found = RemoteFile(f"{base}/{inside}", info.path, system, _stat(info))
        return found, tuple(inside.split("/"))

    if not pattern:
        info = told(shown, lambda: system.get_file_info(place))
        if info.type == pa_fs.FileType.File:
            found = RemoteFile(base, info.path, system, _stat(info))
            return Listing([(found, (found.name,))], "file")
    deep = not pattern or len(pattern) > 1 or "**" in pattern
    selector = pa_fs.FileSelector(place, recursive=deep, allow_not_found=True)
    infos = told(shown, lambda: system.get_file_info(selector))
    files = [file(info) for info in infos if info.type == pa_fs.FileType.File]
    if not files and fixed.lower().startswith(_OF_BUCKETS):
        bucket = place.partition("/")[0]
        if told(shown, lambda: system.get_file_info(bucket)).type == pa_fs.FileType.NotFound:
            raise UserError(f"{shown}: there is no such bucket; name one that is there")
    if pattern:
        files = [one for one in files if _fits(one[1], pattern)]
    return Listing(sorted(files, key=lambda one: one[1]), "pattern" if pattern else "folder")


def _parts(url: str) -> tuple[str, tuple[str, ...], str]:
    """A URL's part without a pattern, the names of its pattern, and its options."""
    match = URL.match(url)
    assert match is not None
    known = match[1].lower() in _OF_ARROW
    body, _, options = url.partition("?") if known else (url, "", "")
    names = body[match.end() :].split("/")
    signs = "*[" if known else "*"
    first = next((n for n, name in enumerate(names) if any(s in name for s in signs)), None)
    if first is None:
        return body, (), options
    if first == 0:
        raise UserError(f"path='{url}': a pattern cannot stand for the bucket or host; name it")
    return match[0] + "/".join(names[:first]), tuple(names[first:]), options


def _system(base: str, options: str) -> tuple[Any, str]:
    """The file system of a URL, and the place of the URL in it."""
    match = URL.match(base)
    assert match is not None
    if match[1].lower() in _OF_ARROW:
        quoted = match[0] + quote(base[match.end() :], safe="/@:=+,~")
        system, place = pa_fs.FileSystem.from_uri(f"{quoted}?{options}" if options else quoted)
        return system, place
    from fsspec.core import url_to_fs  # noqa: PLC0415 - of its file systems only some are installed

    of_fsspec, place = url_to_fs(base)
    return pa_fs.PyFileSystem(pa_fs.FSSpecHandler(of_fsspec)), place


def _stat(info: Any) -> FileStat:
    return FileStat(st_size=info.size or 0, st_mtime_ns=info.mtime_ns or 0)


def _fits(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path fits a pattern, of which ``**`` stands for any number of folders."""
    if not pattern:
        return not names
    if pattern[0] == "**":
        rest = pattern[1:] or ("*",)
        return any(_fits(names[skipped:], rest) for skipped in range(len(names)))
    if not names or not fnmatch.fnmatchcase(names[0], pattern[0]):
        return False
    return _fits(names[1:], pattern[1:])
