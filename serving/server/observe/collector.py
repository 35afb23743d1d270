"""A collector of spans: where it is, and what it is told beside them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tessera.errors import UserError
from tessera.serving.repository.small_file import read_small_file

REMEDY = (
    "give http://HOST:PORT or https://HOST:PORT of a collector that takes OTLP over HTTP, such as "
    "http://127.0.0.1:4318"
)
"""What to do about an address that is not one."""

_DEFAULT_PORTS = {"http": 4_318, "https": 443}
_MOST_PORT = 65_535
_TRACES_PATH = "/v1/traces"
_MAX_HEADERS_BYTES = 16 * 1024

_URL = re.compile(
    r"(?P<scheme>https?)://(?:\[(?P<ipv6>[^\[\]/]+)\]|(?P<name>[^\[\]/:]+))"
    r"(?::(?P<port>[0-9]{1,18}))?(?P<path>/.*)?"
)
_PLAIN = re.compile(r"[!-~]+")
_HEADER_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HEADER_VALUE = re.compile(rb"[ -~]+")
_BLANKS = b" \t\r"

_OWN_HEADERS = {
    "connection",
    "content-length",
    "content-type",
    "host",
    "transfer-encoding",
    "user-agent",
}
"""What a request has anyhow."""


@dataclass(frozen=True, slots=True)
class Collector:
    """Where spans go.

    Attributes:
        url: as it was given.
        host: without brackets.
        port: of HTTP.
        path: with ``/v1/traces``.
        encrypted: by TLS.
    """

    url: str
    host: str
    port: int
    path: str
    encrypted: bool


def read_collector(url: str) -> Collector:
    """The collector of ``--otlp-endpoint``: ``http://HOST[:PORT][/PATH]`` or ``https://HOST[:PORT][/PATH]``.

    Where there is no port, 4318 is meant by ``http``, and 443 by ``https``.

    Raises:
        ValueError: ``url`` is not such an address.
    """
    match = _URL.fullmatch(url)
    if match is None or not _PLAIN.fullmatch(url) or set("@?#\\") & set(url):
        raise ValueError(url)
    port = int(match["port"] or _DEFAULT_PORTS[match["scheme"]])
    if not 1 <= port <= _MOST_PORT:
        raise ValueError(url)
    path = (match["path"] or "").rstrip("/") + _TRACES_PATH
    host = match["ipv6"] or match["name"]
    return Collector(url, host, port, path, encrypted=match["scheme"] == "https")


def parse_collector_headers(content: bytes) -> dict[str, str]:
    """The headers in the content of the file of ``--otlp-headers-file``: ``NAME: VALUE`` on each line.

    What follows ``#`` at the start of a line is not read.  A name is a token of HTTP and given once, and none of those
    that a request has anyhow; a value is printable ASCII.

    Raises:
        UserError: it has to be changed; the text names the line and quotes no value.
    """
    headers: dict[str, str] = {}
    for number, whole in enumerate(content.split(b"\n"), 1):
        line = whole.strip(_BLANKS)
        if not line or line.startswith(b"#"):
            continue
        name, _, value = line.partition(b":")
        value = value.strip(_BLANKS)
        if not _HEADER_NAME.fullmatch(name) or not value:
            raise UserError(f"line {number} is not a header; write NAME: VALUE")
        if not _HEADER_VALUE.fullmatch(value):
            raise UserError(f"line {number} has a value that is not printable ASCII")
        lower = name.decode().lower()
        if lower in _OWN_HEADERS:
            raise UserError(
                f"line {number} gives the header '{lower}', which every request has anyhow; leave it out"
            )
        if lower in map(str.lower, headers):
            raise UserError(f"line {number} gives the header '{lower}' again")
        headers[name.decode()] = value.decode()
    if not headers:
        raise UserError("it holds no header; write NAME: VALUE on a line")
    return headers


def read_collector_headers(path: str) -> dict[str, str]:
    """The same of a file, which the text of an error names, too.

    Raises:
        UserError: the file is missing or has to be changed.
    """
    content = read_small_file(Path(path), _MAX_HEADERS_BYTES)
    if content is None:
        raise UserError(f"{path}: there is no such file")
    try:
        return parse_collector_headers(content)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
