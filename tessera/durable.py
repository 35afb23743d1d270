"""Files that are whole, and on the disk, before they have their name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

PARTIAL_SUFFIX = ".partial"
"""What the hidden names of unfinished files and folders end in."""


def sync(path: Path) -> None:
    """Wait until the file, or the names in the folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of ``path`` when the block ends without an error.

    Until it is whole and on the disk it has a hidden name in the same folder; the rename is on the
    disk when the block has ended.

    Raises:
        OSError: the file cannot be written; ``path`` is as it was.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    try:
        with partial.open("wb") as stream:
            yield stream
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
