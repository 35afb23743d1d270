"""Files that hold secrets."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any


def warn_if_readable(path: str, log: Any) -> None:
    """Warn of a secret file that every user of this machine may read."""
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return
    if mode & stat.S_IROTH:
        log.warning("secret_readable_by_others", path=path, mode=f"{stat.S_IMODE(mode):o}")
