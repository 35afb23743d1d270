"""How many bytes of bodies over HTTP may be inside the server at once, owned by the event loop.

A body counts from its first byte until its message has been made of it; from then on the message counts for the
`ByteBudget` as gRPC's do.  Small bodies are free, for the connections bound them.
"""

from __future__ import annotations

from tessera.serving.server.errors import QueueFullError

FREE_BYTES = 64 * 1024
_SHARE = 4


class BodyRoom:
    """Bytes of all bodies together.

    Args:
        max_inflight_bytes: of requests; bodies may have a quarter of it beside them.
        max_body_bytes: the largest body, for one of which there is always room at first.
    """

    def __init__(self, max_inflight_bytes: int, max_body_bytes: int) -> None:
        self._limit = max(max_inflight_bytes // _SHARE, max_body_bytes)
        self._held = 0

    def take(self, count: int) -> None:
        """Take ``count`` bytes.

        Raises:
            QueueFullError: there are not so many.
        """
        if self._held + count > self._limit:
            raise QueueFullError(
                f"the server is full: bodies of requests over HTTP take {self._held} bytes (limit "
                f"{self._limit}); try again later"
            )
        self._held += count

    def give(self, count: int) -> None:
        """Give back ``count`` bytes."""
        self._held -= count


class Body:
    """One body that is being received.

    Args:
        room: where its bytes are taken from.
    """

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._taken = 0

    def __enter__(self) -> Body:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self._room.give(self._taken)
        self._pieces.clear()

    def add(self, piece: bytes) -> None:
        """More of it has come.

        Raises:
            QueueFullError: see `BodyRoom.take`.
        """
        if self._bytes + len(piece) > FREE_BYTES:
            self._room.take(len(piece))
            self._taken += len(piece)
        self._pieces.append(piece)
        self._bytes += len(piece)

    def whole(self) -> bytes:
        """All that has come."""
        content = b"".join(self._pieces)
        self._pieces.clear()
        return content
