"""URLs among the paths of a config: which they are, and what may stand in one.  Loads no pyarrow."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tessera.errors import UserError

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")  # of two letters at least: C:/ is a drive


def is_url(path: str) -> bool:
    """Whether a path of a config is a URL."""
    return URL.match(path) is not None


def check_url(path: str, named: str) -> None:
    """Refuse a URL that holds a password, which configs, run folders and packages would keep.

    Raises:
        UserError: it does; the message does not repeat it.
    """
    if not is_url(path):
        return
    parts = urlsplit(path)
    account = parts.netloc.rpartition("@")[0]
    if ":" in account or "secret_key=" in parts.query:
        raise UserError(
            f"{named}='{parts.scheme}://...': the URL holds a password, which the run's config would"
            " keep; give it by environment variables, such as AWS_ACCESS_KEY_ID and"
            " AWS_SECRET_ACCESS_KEY"
        )


def local_path(path: str) -> str:
    """The path that a ``file://`` URL names; any other path as it is."""
    if not path.lower().startswith("file://"):
        return path
    parts = urlsplit(path)
    if parts.netloc not in {"", "localhost"}:
        raise UserError(f"path='{path}': file://{parts.netloc} is another machine; write file:///")
    return unquote(parts.path)


def cache_of_urls() -> Path:
    """The folder of prepared files for data beside which nothing can be kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tessera" / "data"
