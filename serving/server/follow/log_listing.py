"""Which commits are in the folder of a log, without listing it at each look.

Whether the next one is there is asked for by its name, and only where it is not the folder is listed, which
says whether it is missing.  A folder of 100,000 commits takes some 200 ms to list; listings take no more than a
hundredth of the time, so that in such a folder a missing commit is noticed some 20 seconds later, and in one of
a hundred at the next look.  It is never noticed later than half a minute: a listing may have taken seconds because the machine
or the storage stood still, which says nothing about the next one.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from tessera.serving.commits.chain import commit_name, parse_commit_name

_PAUSES = 99
"""Time between two listings, in times of what the last one has taken."""

_LONGEST_PAUSE_S = 30.0


class LogListing:
    """The names in the folder of one log, for one thread at a time.

    Args:
        folder: the log's; it need not be there.
        clock: seconds, monotonic.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._found: list[str] = []
        self._due = -math.inf

    def names_from(self, number: int) -> list[str]:
        """The name of commit ``number`` alone if it is there; else those behind it that the last listing has found.

        Raises:
            OSError: the folder cannot be read.
        """
        name = commit_name(number)
        if self._is_there(name):
            return [name]
        begin = self._clock()
        if begin >= self._due:
            self._found = [one for one in self._list() if (parse_commit_name(one) or 0) >= number]
            end = self._clock()
            self._due = end + min(_PAUSES * (end - begin), _LONGEST_PAUSE_S)
        return self._found

    def _is_there(self, name: str) -> bool:
        # The folder is opened at each look: a network file system then asks what has changed in it.
        try:
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # the listing says why
            return False
        try:
            os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return False
        finally:
            os.close(folder)
        return True

    def _list(self) -> list[str]:
        if not self._folder.is_dir():
            return []
        with os.scandir(self._folder) as entries:
            return [entry.name for entry in entries]
