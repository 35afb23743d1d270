"""How many bytes of requests and answers may be inside the server at once, owned by the event loop."""

from __future__ import annotations

from tessera.serving.server.errors import InvalidRequestError, QueueFullError

CALL_BYTES = 16 * 1024
"""What gRPC and this server hold for a call beside its message and its answer."""


class ByteBudget:
    """Bytes of all calls together.

    Args:
        limit: the most that they may take.

    Attributes:
        limit: the most that the calls may take.
        held: what they take now.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0


class HeldBytes:
    """One call's share, from its request's arrival until its answer has left.

    Args:
        budget: where it is taken from.
    """

    __slots__ = ("_budget", "_bytes")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._bytes = 0

    def take(self, count: int) -> None:
        """Take what the request will hold; once.

        Raises:
            InvalidRequestError: it is more than there will ever be.
            QueueFullError: it is more than there is.
        """
        budget = self._budget
        if count > budget.limit:
            raise InvalidRequestError(
                f"the request takes {count} bytes in the server, the limit is {budget.limit}"
            )
        if budget.held + count > budget.limit:
            raise QueueFullError(
                f"the server is full: requests and answers in it take {budget.held} bytes (limit "
                f"{budget.limit}), this request brings {count}; try again later"
            )
        budget.held += count
        self._bytes = count

    def keep(self, count: int) -> None:
        """Give back all but ``count`` bytes, if there are more."""
        if count < self._bytes:
            self._budget.held -= self._bytes - count
            self._bytes = count
