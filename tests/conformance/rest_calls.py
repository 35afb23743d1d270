"""Speaks REST as a plain client does, and gives status, headers and body."""

import http.client
import json
from dataclasses import dataclass

from tests.conformance.conformance_harness import TIMEOUT_S


@dataclass(frozen=True)
class Reply:
    """An answer: HTTP's status, its headers by lower-case name, and the body's bytes."""

    status: int
    headers: dict
    content: bytes

    @property
    def json(self):
        """The body's JSON, without what follows it."""
        size = self.headers.get("inference-header-content-length")
        return json.loads(self.content if size is None else self.content[: int(size)])


class RestClient:
    """One connection, kept from call to call as long as the server keeps it."""

    def __init__(self, address):
        host, _, port = address.rpartition(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.close()

    def call(self, method, path, body=None, headers=None):
        self.connection.request(method, path, body=body, headers=headers or {})
        reply = self.connection.getresponse()
        headers = {name.lower(): value for name, value in reply.getheaders()}
        return Reply(reply.status, headers, reply.read())

    def get(self, path):
        return self.call("GET", path)

    def infer(self, body, path="/v2/models/ranker/infer", **headers):
        """``body``: bytes, or what becomes JSON; a header's name has '_' for '-'."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): str(value) for name, value in headers.items()}
        return self.call("POST", path, content, named)
