"""The folder of recorded requests: files of bounded size, and a bound on all of them.

Several processes may write to one folder, each to a file of its own, which it holds a lock on (flock) while it writes; so
a file whose writer was killed is free at once.  Before a file is begun, the oldest ones that nobody writes to are removed
until it fits; a file that is being written to counts as if it were full.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tessera.errors import UserError
from tessera.serving.server.observe.record_format import (
    HEADER_BYTES,
    RecordingHeader,
    is_recording_name,
    recording_header,
)

_FILE_MODE = 0o600
"""Requests hold what is known of users: for nobody else."""
_FOLDER_MODE = 0o700
_NAME_TRIES = 1_000


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """What an operator may say of the recording of requests.

    Attributes:
        folder: where the files are.
        share: of the calls, 0 to 1.
        file_bytes: of one file at most.
        folder_bytes: of all files of the folder at most.
    """

    folder: str
    share: float
    file_bytes: int
    folder_bytes: int


class NoRoomError(OSError):
    """Files that others write to take the whole bound."""


def check_record_folder(folder: str) -> None:
    """Make the folder, for its owner alone, where there is none; an empty name stands for no folder.

    Raises:
        UserError: it cannot be written to.
    """
    if not folder:
        return
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, _FOLDER_MODE)  # noqa: PTH102 - beside os.open and os.access
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise UserError(
            f"the folder of recorded requests '{folder}' cannot be written to ({error.strerror}); "
            "give --record another folder"
        ) from None


class RecordFiles:
    """Writes records; belongs to one thread, which it blocks as long as the disk does.

    Args:
        options: the folder and its bounds.
        header: begins every file.

    Attributes:
        room: bytes of records that a file takes.
    """

    def __init__(self, options: RecordOptions, header: RecordingHeader) -> None:
        self.room = options.file_bytes - HEADER_BYTES
        self._options = options
        self._header = header
        self._file = -1
        self._size = 0

    def write(self, records: bytes) -> None:
        """Append whole records, `room` bytes at most, to one file.

        Raises:
            OSError: they cannot be written; then none of them is there.
        """
        full = self._size + len(records) > self._options.file_bytes
        if self._file < 0 or full or os.fstat(self._file).st_nlink == 0:
            self._open_next()
        self._append(records)

    def close(self) -> None:
        """Write no more."""
        if self._file >= 0:
            descriptor, self._file = self._file, -1
            os.close(descriptor)

    def _append(self, content: bytes) -> None:
        rest = memoryview(content)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            # The part that was written goes: readers would stop there.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            self.close()
            raise
        self._size += len(content)

    def _open_next(self) -> None:
        self.close()
        folder = os.open(self._options.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # One process after the other.  Some file systems have no lock for folders; then the bound holds for each
            # of them alone.
            with contextlib.suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
            self._make_room(folder)
            self._file = self._new_file(folder)
        finally:
            os.close(folder)
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._size = 0
        self._append(recording_header(self._header))

    def _make_room(self, folder: int) -> None:
        options = self._options
        # The oldest first: names begin with the time.
        files = sorted(_files_of(folder))
        held = options.file_bytes
        held += sum(max(size, options.file_bytes) if used else size for _, size, used in files)
        for name, size, used in files:
            if held <= options.folder_bytes:
                return
            if not used:
                os.unlink(name, dir_fd=folder)
                held -= size
        if held > options.folder_bytes:
            raise NoRoomError(
                f"files that others write to leave no room in {options.folder_bytes} bytes, the bound of "
                "--record-bytes"
            )

    def _new_file(self, folder: int) -> int:
        micros = time.time_ns() // 1_000
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        for number in range(micros, micros + _NAME_TRIES):
            name = f"requests-{number:016d}-{self._header.process}.rec"
            with contextlib.suppress(FileExistsError):
                return os.open(name, flags, _FILE_MODE, dir_fd=folder)
        raise FileExistsError(17, "every name is taken")


def _files_of(folder: int) -> Iterator[tuple[str, int, bool]]:
    """Name, bytes, and whether somebody writes to it, of each file of the folder."""
    for name in os.listdir(folder):
        if not is_recording_name(name):
            continue
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(name, flags, dir_fd=folder)
        except OSError:
            continue
        try:
            used = False
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                used = True
            yield name, os.fstat(descriptor).st_size, used
        finally:
            os.close(descriptor)
