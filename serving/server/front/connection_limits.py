"""How many connections the gRPC port has, how old they become, and how long they may be without a call.

gRPC's library counts a connection from its acceptance, before TLS is agreed upon, to its end, for each address that it
listens on, and closes one above the limit at once (``grpc.max_allowed_incoming_connections``, since gRPC 1.63).  A client
that is sent away so is told UNAVAILABLE, for nothing of its call was read, and tries again by itself.  The server does
not hear of it.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass

_OTHER_DESCRIPTORS = 64
_LEAST_CONNECTIONS = 16

_AGE_GRACE_MS = 30_000
"""What calls may take that are open when their connection is too old."""


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits of one process's connections.

    Attributes:
        most: connections at a time.
        max_age_s: how old a connection may become, a tenth more or less, in seconds; 0: any age.
        idle_s: how long a connection may be without a call, in seconds.
    """

    most: int
    max_age_s: int
    idle_s: int

    def grpc_options(self) -> list[tuple[str, int]]:
        """The settings of gRPC's server that make it so."""
        options = [
            ("grpc.max_allowed_incoming_connections", self.most),
            ("grpc.max_connection_idle_ms", self.idle_s * 1_000),
        ]
        if self.max_age_s:
            options.append(("grpc.max_connection_age_ms", self.max_age_s * 1_000))
            options.append(("grpc.max_connection_age_grace_ms", _AGE_GRACE_MS))
        return options


def connections_to_be_had(most: int, other_descriptors: int = 0) -> int:
    """The connections that this process has descriptors for, at most ``most``.

    Args:
        most: connections that are wished for.
        other_descriptors: that the process may need beside those that it has in any case.

    Returns:
        ``most``, or what the limit of open files leaves, which is taken for 16 at least.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    return min(most, max(_LEAST_CONNECTIONS, soft - _OTHER_DESCRIPTORS - other_descriptors))
