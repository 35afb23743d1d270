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
        # A map of managed collisions has only ``purge``, by which it forgets ids that wait for a row.
        if callable(getattr(part, "flush", None)):
            getattr(part, what)()


def forget_state_before(model: nn.Module) -> None:
    """Let every part of ``model`` forget what followed from the state before a checkpoint was loaded.

    These are caches, and the ids that wait for a row in maps of managed collisions.
    """
    for part in model.modules():
        purge = getattr(part, "purge", None)
        if callable(purge):
            purge()
