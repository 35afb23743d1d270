"""How many bytes of requests and answers may be inside the server at once, owned by the event loop."""

from __future__ import annotations

from tessera.serving.server.errors import InvalidRequestError, QueueFullError

CALL_BYTES = 16 * 1024
"""What gRPC and this server hold for a call beside its message and its answer."""


_CONNECTION_SHARE = 2
"""A connection's calls may take the budget divided by this; a single one of them may take more."""


class ByteBudget:
    """Bytes of all calls together.

    Args:
        limit: the most that they may take.

    Attributes:
        limit: the most that the calls may take.
        held: what they take now.
        share: the most that several calls of one connection may take.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.share = limit // _CONNECTION_SHARE
        self._by_connection: dict[str, int] = {}

    def held_by(self, connection: str) -> int:
        """What the calls of ``connection`` take now."""
        return self._by_connection.get(connection, 0)

    def add(self, connection: str, count: int) -> None:
        """Count ``count`` bytes more, or fewer, for a call of ``connection``."""
        self.held += count
        held = self.held_by(connection) + count
        if held:
            self._by_connection[connection] = held
        else:
            self._by_connection.pop(connection, None)


class HeldBytes:
    """What one call holds, from its request's arrival until its answer has left.

    Args:
        budget: where it is taken from.
        connection: names the client's connection.
    """

    __slots__ = ("_budget", "_bytes", "_connection")

    def __init__(self, budget: ByteBudget, connection: str) -> None:
        self._budget = budget
        self._connection = connection
        self._bytes = 0

    def take(self, count: int) -> None:
        """Take what the request will hold; once.

        Raises:
            InvalidRequestError: it is more than there will ever be.
            QueueFullError: it is more than there is, or than the connection's share.
        """
        budget = self._budget
        if count > budget.limit:
            raise InvalidRequestError(
                f"the request takes {count} bytes in the server, the limit is {budget.limit}"
            )
        of_connection = budget.held_by(self._connection)
        if of_connection and of_connection + count > budget.share:
            raise QueueFullError(
                f"the connection has its share: requests and answers of it take {of_connection} bytes "
                f"(limit {budget.share}), this request brings {count}; try again later"
            )
        if budget.held + count > budget.limit:
            raise QueueFullError(
                f"the server is full: requests and answers in it take {budget.held} bytes (limit "
                f"{budget.limit}), this request brings {count}; try again later"
            )
        budget.add(self._connection, count)
        self._bytes = count

    def keep(self, count: int) -> None:
        """Give back all but ``count`` bytes, if there are more."""
        if count < self._bytes:
            self._budget.add(self._connection, count - self._bytes)
            self._bytes = count
