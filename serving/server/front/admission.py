"""Which calls may come in: all until the server drains, then none."""

from __future__ import annotations

import asyncio

from tessera.serving.server.errors import Code, RejectReason, ServeError


class Admission:
    """Counts the calls that are inside, and refuses new ones once it is shut.

    Attributes:
        active: calls that are inside.
        refused: calls that came too late.
    """

    def __init__(self) -> None:
        self.active = 0
        self.refused = 0
        self._shut = False
        self._empty = asyncio.Event()

    def enter(self) -> None:
        """A call comes in.

        Raises:
            ServeError: UNAVAILABLE, the server is draining.
        """
        if self._shut:
            self.refused += 1
            raise ServeError(Code.UNAVAILABLE, "the server is draining", RejectReason.DRAINING)
        self.active += 1

    def leave(self) -> None:
        """A call that came in has its answer."""
        self.active -= 1
        if self._shut and self.active == 0:
            self._empty.set()

    def shut(self) -> None:
        """Refuse every new call from now on."""
        self._shut = True
        if self.active == 0:
            self._empty.set()

    async def wait_empty(self) -> None:
        """Return when the last call has left; only after `shut`."""
        await self._empty.wait()
