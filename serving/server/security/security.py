"""What guards a server, and the files that it is made of: read when they change, and on SIGHUP.

A file that has changed is taken for calls and connections that begin afterwards.  One that cannot be used changes
nothing: what was read before goes on, a line of the log says why, and `tessera_secret_reloads_total` counts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tessera.errors import UserError
from tessera.serving.server.config import ServerConfig
from tessera.serving.server.metrics.security_metrics import SecurityMetrics
from tessera.serving.server.security.authorizer import Authorizer
from tessera.serving.server.security.certificates import Certificates, TlsFiles
from tessera.serving.server.security.file_watch import FileWatch
from tessera.serving.server.security.rates import Rates
from tessera.serving.server.security.secret_file import warn_if_readable

_LOOK_S = 1.0


@dataclass(frozen=True)
class Shared:
    """What the processes of one server have in common.

    Attributes:
        rates: how often each token has called.
        own_token: by which they know one another; empty: there is one process.
        folder: where each worker listens for the others without TLS, which only this server's user can enter; empty:
            they ask one another on the gRPC port.
        origin_secret: see `GrpcOrigins`.
    """

    rates: Rates = field(default_factory=Rates)
    own_token: str = field(default="", repr=False)
    folder: str = ""
    origin_secret: str = field(default="", repr=False)

    def address_of(self, worker: int) -> str:
        """Where a worker listens in ``folder``, as gRPC writes it."""
        return f"unix:{self.folder}/{worker}"


@dataclass
class _Watched:
    """Files of one kind: how they are watched and read again; reading returns what the log tells."""

    kind: str
    watch: FileWatch
    read: Callable[[], dict[str, Any]]


class Security:
    """The guards of one process.

    Args:
        config: names the files.
        metrics: counts refusals and files that were read again.
        log: told of the latter.
        shared: see `Shared`.

    Attributes:
        authorizer: admits calls; None: whoever reaches a port may call.
        certificates: what connections encrypt with; None: they do not.

    Raises:
        UserError: a file has to be changed.
    """

    def __init__(
        self, config: ServerConfig, metrics: SecurityMetrics, log: Any, shared: Shared | None = None
    ) -> None:
        self._metrics = metrics
        self._log = log
        self._watched: list[_Watched] = []
        self._task: asyncio.Task[None] | None = None
        shared = shared or Shared()
        self.authorizer: Authorizer | None = None
        self.certificates: Certificates | None = None
        if config.tls_cert:
            self._watch_certificates(config)
        if config.auth_token_file:
            path = config.auth_token_file
            watch = FileWatch([path])
            authorizer = Authorizer(path, shared.rates, metrics, log, shared.own_token)
            self.authorizer = authorizer
            self._add(_Watched("tokens", watch, lambda: {"tokens": authorizer.read()}))

    def _watch_certificates(self, config: ServerConfig) -> None:
        files = TlsFiles(cert=config.tls_cert, key=config.tls_key, client_ca=config.tls_client_ca)
        watch = FileWatch(files.paths)
        certificates = self.certificates = Certificates(files)

        def tell() -> dict[str, Any]:
            warn_if_readable(files.key, self._log)
            self._metrics.certificate_ends = certificates.ends.timestamp()
            return {"ends": certificates.ends.strftime("%Y-%m-%dT%H:%M:%SZ")}

        def read() -> dict[str, Any]:
            certificates.read()
            return tell()

        tell()
        self._add(_Watched("certificates", watch, read))

    def http_tls(self) -> Callable[[], ssl.SSLContext] | None:
        """What gives a new connection of the HTTP port what it encrypts with; None: it does not."""
        certificates = self.certificates
        return None if certificates is None else lambda: certificates.http

    @property
    def has_files(self) -> bool:
        """Whether there is anything to read again."""
        return bool(self._watched)

    def start(self) -> None:
        """Look at the files from now on, once a second; inside an event loop."""
        if self._watched:
            self._task = asyncio.get_running_loop().create_task(self._look_often())

    async def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def read_again(self) -> None:
        """Read every file now."""
        for one in self._watched:
            one.watch.forget()
            self._read(one)

    async def _look_often(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for one in self._watched:
                if one.watch.changed():
                    self._read(one)

    def _add(self, watched: _Watched) -> None:
        self._metrics.watch(watched.kind)
        self._watched.append(watched)

    def _read(self, one: _Watched) -> None:
        counts = self._metrics.reloads[one.kind]
        try:
            told = one.read()
        except UserError as error:
            counts["refused"] += 1
            self._log.warning(f"{one.kind}_not_reloaded", error=str(error))
        else:
            counts["taken"] += 1
            self._log.info(f"{one.kind}_reloaded", **told)
