"""Whether a call may be heard: its token, and how many calls that allows."""

from __future__ import annotations

import hmac
import time
from typing import Any

from tessera.serving.server.errors import Code, ServeError
from tessera.serving.server.metrics.security_metrics import SecurityMetrics
from tessera.serving.server.security.rates import Rates
from tessera.serving.server.security.secret_file import warn_if_readable
from tessera.serving.server.security.token_file import read_token_file

_SCHEME = "bearer"


class Authorizer:
    """Holds callers to the tokens of a file.

    Args:
        path: the file, see `token_file`.
        rates: counts the calls, of this process or of several.
        metrics: counts what is refused.
        log: told of a file that others may read.
        own_token: another token, without a limit, by which processes of this server know one another; empty: none.

    Raises:
        UserError: the file has to be changed.
    """

    def __init__(
        self, path: str, rates: Rates, metrics: SecurityMetrics, log: Any, own_token: str = ""
    ) -> None:
        self._path = path
        self._rates = rates
        self._metrics = metrics
        self._log = log
        self._own_token = own_token
        self._tokens = read_token_file(path)
        warn_if_readable(path, log)

    def read(self) -> int:
        """Read the file again; returns how many tokens it has.

        Raises:
            UserError: it has to be changed; the tokens are those of before.
        """
        self._tokens = read_token_file(self._path)
        warn_if_readable(self._path, self._log)
        return len(self._tokens)

    def admit(self, authorization: str | None) -> None:
        """Count a call with this ``authorization`` header.

        Raises:
            ServeError: UNAUTHENTICATED or RESOURCE_EXHAUSTED.
        """
        scheme, _, given = (authorization or "").partition(" ")
        given = given.strip(" ")
        if scheme.lower() != _SCHEME or not given:
            self._metrics.refused["no_token"] += 1
            raise ServeError(
                Code.UNAUTHENTICATED,
                "the call has no token; send it as 'authorization: Bearer TOKEN'",
            )
        token = self._tokens.find(given)
        if token is None:
            if self._own_token and self._is_own(given):
                return
            self._metrics.refused["unknown_token"] += 1
            raise ServeError(Code.UNAUTHENTICATED, "this server does not know the call's token")
        if not self._rates.take(token, time.monotonic_ns()):
            self._metrics.refused["rate"] += 1
            raise ServeError(
                Code.RESOURCE_EXHAUSTED,
                f"the token '{token.name}' allows {token.calls_per_s:g} calls a second, and there were more; "
                "try again later",
            )

    def _is_own(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="surrogateescape"), self._own_token.encode())
