"""Small files that are read as a whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tessera.errors import UserError


def read_small_file(path: Path, max_bytes: int) -> bytes | None:
    """The content of the regular file ``path``; None where there is none.

    Raises:
        UserError: it cannot be read, is not a regular file, or has more than ``max_bytes``.
    """
    try:
        # A pipe would otherwise be waited for until its other end is opened.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # fdopen refuses a folder in other words
        os.close(descriptor)
        raise UserError(f"{path}: is not a regular file; put one in its place or remove it")
    with os.fdopen(descriptor, "rb") as stream:
        try:
            content = stream.read(max_bytes + 1)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    if len(content) > max_bytes:
        raise UserError(f"{path}: has more than {max_bytes} bytes, the limit; make it shorter")
    return content
