"""Caches of rows on a GPU, where tables lie in host memory."""

from __future__ import annotations

from typing import Literal

from torch import nn


def tell_caches(model: nn.Module, what: Literal["flush", "purge"]) -> None:
    """Let every cache of ``model`` write its rows back, or forget them.

    Before tables are read from their own memory, caches are flushed; after they were written there,
    purged.  Parts without a cache do nothing.
    """
    for part in model.modules():
        method = getattr(part, what, None)
        if callable(method):
            method()
