"""Whether files have changed, by what the system says of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

Mark = tuple[int, int, int, int] | None


class FileWatch:
    """Tells once of each change, when the files have stayed as they are from one look to the next.

    So a file that is being written, or two that belong together and change one after the other, are seen when they
    are whole.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._known = self._last = self._marks()

    def changed(self) -> bool:
        """Look; whether the files are others than when this was last true, and as the look before saw them."""
        now = self._marks()
        settled, self._last = now == self._last, now
        if not settled or now == self._known:
            return False
        self._known = now
        return True

    def forget(self) -> None:
        """The files as they now are have been seen."""
        self._known = self._last = self._marks()

    def _marks(self) -> list[Mark]:
        return [_mark(path) for path in self._paths]


def _mark(path: str) -> Mark:
    try:
        about = Path(path).stat()
    except OSError:
        return None
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
