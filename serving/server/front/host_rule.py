"""By which names a browser may ask the HTTP port for its pages.

Whoever wrote a page may make its own name stand for this machine once a browser shows it (DNS rebinding): to the browser
this server's pages are then the page's own, and it may read them.  What gives it away is the Host of its requests, which
is the name and which no page can set.  So a browser has to ask by an IP address, by localhost, or by a name that
--allowed-host gives.  Programs may ask by any name: they show no pages of strangers.  docs/security.md tells more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiohttp import web

from tessera.serving.server.config import ServerConfig, host_name_of
from tessera.serving.server.front.http_refusals import RefusedRequestError, refusal

PROBES = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})
"""Paths that tell only whether the server lives and is ready."""

_ANY = "*"
_MARKS = ("Accept-Language", "Origin", "Referer", "Cookie", "Sec-Fetch-Site", "Sec-Fetch-Mode")
"""Headers that browsers send and programs do not.  A page can neither remove the first, which every browser sends, nor
set most of the others."""

_REFUSAL = (
    "the request's Host is not a name of this server; a browser has to ask by an IP address, by localhost, or by a "
    "name of --allowed-host"
)


class HostRule:
    """The names of a server.

    Args:
        listens_on: the host that the port listens on.
        allowed: names that browsers may ask by besides; ``*``: any.
        guarded: whether tokens or certificates guard the port, which a rebound name does not have.

    Attributes:
        covers_pages: whether browsers are held to the names.  They are not where the server is guarded, where ``*`` is
            allowed, and, if no name is given, where other machines reach the port: they do so by names that only
            their owner knows.
    """

    def __init__(
        self, listens_on: str, allowed: Sequence[str] = (), *, guarded: bool = False
    ) -> None:
        self._allowed = frozenset(map(host_name_of, allowed))
        named = bool(allowed) or _is_loopback(listens_on)
        self.covers_pages = named and not guarded and _ANY not in self._allowed

    @classmethod
    def of(cls, config: ServerConfig) -> HostRule:
        """The rule of a server."""
        guarded = bool(config.tls_cert or config.auth_token_file)
        return cls(config.host, config.allowed_hosts, guarded=guarded)

    def knows(self, host: str) -> bool:
        """Whether ``host``, a header's value, is an IP address, localhost or an allowed name, with a port or without."""
        if host.startswith("["):  # an address of IPv6
            return True
        name = host_name_of(host.partition(":")[0])
        if not name:
            return False
        return not name.strip("0123456789.") or _is_local(name) or name in self._allowed

    def refused_page(self, request: web.Request) -> web.Response | None:
        """What a request for a page is refused with, and its connection ends with; None: it may go on."""
        if not self.covers_pages or request.method not in {"GET", "HEAD"}:
            return None
        if request.rel_url.raw_path in PROBES or self.knows(request.headers.get("Host", "")):
            return None
        if not _is_from_browser(request.headers):
            return None
        response = refusal(RefusedRequestError(403, _REFUSAL))
        response.force_close()
        return response


def _is_from_browser(headers: Mapping[str, str]) -> bool:
    named = any(name in headers for name in _MARKS)
    return named or headers.get("User-Agent", "").startswith("Mozilla/")


def _is_local(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1" or _is_local(host_name_of(host))
