"""A POSIX shared memory object of a test's own."""

import contextlib
import os
import uuid
from pathlib import Path

import pytest

FOLDER = Path("/dev/shm")


class SharedObject:
    """An object with this content; gone after the ``with`` block."""

    def __init__(self, content):
        if not os.access(FOLDER, os.W_OK):
            pytest.skip("this system has no /dev/shm to write to")
        self.key = f"/tessera-test-{uuid.uuid4().hex}"
        self.path = FOLDER / self.key[1:]
        self.path.write_bytes(content)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    @property
    def content(self):
        return self.path.read_bytes()
