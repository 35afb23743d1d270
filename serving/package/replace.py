"""Put a new file in another's place, whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tessera.durable import sync
from tessera.errors import UserError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a file to write in a folder of its own; at the end it is synced and renamed to ``path``.

    The folder lies beside ``path``, so on the same disk, and is gone afterwards with whatever
    else was put there.  When the block raises, ``path`` stays as it was.

    Raises:
        UserError: the folder cannot be written to, the disk is full, or ``path`` is something else
            than a file.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path} exists and is not a file; give another place for it")
    try:
        folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    except OSError as error:
        raise _cannot_write(path, error) from error
    try:
        draft = folder / path.name
        yield draft
        sync(draft)
        draft.replace(path)
        sync(path.parent)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be written: {error.strerror}; give another place for it")
