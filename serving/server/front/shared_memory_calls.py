"""The calls about shared memory, over gRPC and as JSON over HTTP: docs/kserve.md has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from urllib.parse import unquote_to_bytes

from google.protobuf.message import Message

from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.server.errors import InvalidRequestError
from tessera.serving.server.front.http_refusals import no_such_path
from tessera.serving.server.front.rest_json import read_json
from tessera.serving.server.request.shared_memory import RegionFacts, SharedMemory

ROOT = "/v2/systemsharedmemory/"
"""What their paths begin with: ``[region/NAME/]VERB``; without a name all regions are meant."""

_REGION = "region/"


class SharedMemoryCalls:
    """Answers the calls.

    Args:
        memory: the regions.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def calls(self) -> dict[str, tuple[type[Message], Callable[[Any], Message]]]:
        """By each call's name its request's type, and what answers it or raises `ServeError`."""
        return {
            "SystemSharedMemoryStatus": (ipb.SystemSharedMemoryStatusRequest, self._status),
            "SystemSharedMemoryRegister": (ipb.SystemSharedMemoryRegisterRequest, self._register),
            "SystemSharedMemoryUnregister": (
                ipb.SystemSharedMemoryUnregisterRequest,
                self._unregister,
            ),
        }

    def _status(
        self, request: ipb.SystemSharedMemoryStatusRequest
    ) -> ipb.SystemSharedMemoryStatusResponse:
        response = ipb.SystemSharedMemoryStatusResponse()
        for facts in self._memory.list(request.name):
            region = response.regions[facts.name]
            region.name, region.key = facts.name, facts.key
            region.offset, region.byte_size = facts.offset, facts.byte_size
        return response

    def _register(
        self, request: ipb.SystemSharedMemoryRegisterRequest
    ) -> ipb.SystemSharedMemoryRegisterResponse:
        self._memory.add(RegionFacts(request.name, request.key, request.offset, request.byte_size))
        return ipb.SystemSharedMemoryRegisterResponse()

    def _unregister(
        self, request: ipb.SystemSharedMemoryUnregisterRequest
    ) -> ipb.SystemSharedMemoryUnregisterResponse:
        self._memory.remove(request.name)
        return ipb.SystemSharedMemoryUnregisterResponse()

    # The same over HTTP: its status, and the answer's JSON.

    def get(self, path: str) -> tuple[int, Any]:
        """Answer GET of ``path``, as it stands in the request.

        Raises:
            ServeError: the status to answer with.
        """
        name, verb = _read_path(path)
        if verb != "status":
            return 405, {"error": f"{path} is asked with POST"}
        return 200, [asdict(facts) for facts in self._memory.list(name)]

    def post(self, path: str, body: bytes) -> tuple[int, Any]:
        """Answer POST of ``path``, as it stands in the request.

        Raises:
            ServeError: the status to answer with.
        """
        name, verb = _read_path(path)
        if verb == "status":
            return 405, {"error": f"{path} is asked with GET"}
        if verb == "register":
            self._memory.add(_read_facts(name, body))
        else:
            self._memory.remove(name)
        return 200, {}


def _read_path(path: str) -> tuple[str, str]:
    """The region that ``path`` names, empty where all are meant, and what is asked of it.

    Raises:
        ServeError: NOT_FOUND, there is no such path.
    """
    rest = path.removeprefix(ROOT)
    name = b""
    if named := rest.startswith(_REGION):
        part, slash, rest = rest.removeprefix(_REGION).partition("/")
        name = unquote_to_bytes(part)
        if not (name and slash):
            rest = ""
    verbs = ("status", "unregister", "register")[: 3 if named else 2]
    try:
        if rest in verbs:
            return name.decode(), rest
    except UnicodeDecodeError:
        pass
    raise no_such_path(path)


def _read_facts(name: str, body: bytes) -> RegionFacts:
    found = read_json(body)
    if not isinstance(found, dict):
        raise InvalidRequestError("the JSON is not an object")
    key = found.get("key")
    if not isinstance(key, str):
        raise InvalidRequestError("key is not a string")
    return RegionFacts(name, key, _size(found, "offset"), _size(found, "byte_size"))


def _size(found: dict[str, Any], name: str) -> int:
    size = found.get(name, 0)
    if type(size) is not int or not 0 <= size < 1 << 64:
        raise InvalidRequestError(f"{name} is not a whole number from 0 on")
    return size
