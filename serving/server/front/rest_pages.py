"""What REST tells of the server and its models: every path below ``/v2`` that is asked with GET.

They are the KServe protocol's calls over gRPC in another encoding: `KserveCalls` answers the same messages, and
what a message has becomes a key of a JSON object.  docs/rest.md and docs/openapi.yaml have the paths.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote_to_bytes

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.server.errors import Code, ServeError
from tessera.serving.server.front.http_refusals import no_such_path
from tessera.serving.server.front.shared_memory_calls import ROOT as SHARED_MEMORY
from tessera.serving.server.front.shared_memory_calls import SharedMemoryCalls

ROOT = "/v2"
"""What every path of REST begins with."""

REPOSITORY = "/v2/repository/"
"""What the paths of calls about repositories begin with, which are asked with POST."""

_REPOSITORY_CALL = re.compile(r"/v2/repository/(index|models/[^/]+/(load|unload))")

MODELS = "/v2/models/"
_MODEL_VERBS = ("", "ready", "config", "stats", "infer")
_VERSIONED_PARTS = 3

Json = dict[str, Any]


class KserveCalls(Protocol):
    """Answers the KServe protocol's calls but ModelInfer."""

    async def tell(self, request: Message) -> Any:
        """The response to ``request``, a message such as ModelReadyRequest.

        Raises:
            ServeError: the status to answer with.
        """
        ...


@dataclass(frozen=True, slots=True)
class ModelPath:
    """A path that names a model: ``/v2/models/NAME[/versions/VERSION][/VERB]``; what is left out is empty."""

    name: str
    version: str
    verb: str


def read_model_path(path: str) -> ModelPath | None:
    """What ``path`` names, as it stands in the request; None: it is not a model's.

    Raises:
        ServeError: NOT_FOUND, for what it names is not UTF-8.
    """
    if not path.startswith(MODELS):
        return None
    name, *rest = path.removeprefix(MODELS).split("/")
    version = ""
    if rest[:1] == ["versions"] and len(rest) in {_VERSIONED_PARTS - 1, _VERSIONED_PARTS}:
        version, rest = rest[1], rest[2:]
        if not version:
            return None
    verb = rest[0] if rest else ""
    if not name or len(rest) > 1 or verb not in _MODEL_VERBS or (rest and not verb):
        return None
    return ModelPath(_unquoted(name), _unquoted(version), verb)


def _unquoted(part: str) -> str:
    try:
        return unquote_to_bytes(part).decode()
    except UnicodeDecodeError:
        raise ServeError(Code.NOT_FOUND, "the path is not UTF-8") from None


def _is_posted(path: str) -> tuple[int, Json]:
    return 405, {"error": f"{path} is asked with POST"}


class RestPages:
    """Answers GET.

    Args:
        calls: answers the protocol's calls.
        state: ``ready`` or the word for why the server is not.
        regions: answers those about shared memory; None: they are not there.
    """

    def __init__(
        self,
        calls: KserveCalls,
        state: Callable[[], str],
        regions: SharedMemoryCalls | None = None,
    ) -> None:
        self._regions = regions
        self._calls = calls
        self._state = state

    async def get(self, path: str) -> tuple[int, Any]:
        """HTTP's status and the answer's JSON.

        Args:
            path: as it stands in the request, without what follows a '?'.

        Raises:
            ServeError: the status to answer with.
        """
        if path == "/v2/health/live":
            return 200, {"live": True}
        if path == "/v2/health/ready":
            ready = self._state() == "ready"
            return 200 if ready else 503, {"ready": ready}
        if path == ROOT:
            return 200, as_json(await self._calls.tell(ipb.ServerMetadataRequest()))
        if path == "/v2/models/stats":
            return 200, as_json(await self._calls.tell(ipb.ModelStatisticsRequest()))
        asked = read_model_path(path)
        if asked is None:
            return self._of_regions(path)
        return await self._of_model(asked, path)

    def _of_regions(self, path: str) -> tuple[int, Any]:
        if self._regions is not None and path.startswith(SHARED_MEMORY):
            return self._regions.get(path)
        if _REPOSITORY_CALL.fullmatch(path):
            return _is_posted(path)
        raise no_such_path(path)

    async def _of_model(self, asked: ModelPath, path: str) -> tuple[int, Json]:
        if asked.verb == "infer":
            return _is_posted(path)
        named = {"name": asked.name, "version": asked.version}
        if asked.verb == "ready":
            told = await self._calls.tell(ipb.ModelReadyRequest(**named))
            return 200 if told.ready else 503, {"name": asked.name, "ready": told.ready}
        if asked.verb == "config":
            return 200, as_json((await self._calls.tell(ipb.ModelConfigRequest(**named))).config)
        if asked.verb == "stats":
            return 200, as_json(await self._calls.tell(ipb.ModelStatisticsRequest(**named)))
        return 200, as_json(await self._calls.tell(ipb.ModelMetadataRequest(**named)))


def as_json(message: Message) -> Json:
    """Every field of ``message`` by its name; what is not set has its default, but for messages and choices."""
    found: Json = {}
    for field in message.DESCRIPTOR.fields:
        repeated = field.label == FieldDescriptor.LABEL_REPEATED
        may_be_absent = field.message_type is not None or field.containing_oneof is not None
        if not repeated and may_be_absent and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if repeated and field.message_type and field.message_type.GetOptions().map_entry:
            found[field.name] = {key: as_json(value[key]) for key in sorted(value)}
        elif repeated:
            found[field.name] = [_plain(field, one) for one in value]
        else:
            found[field.name] = _plain(field, value)
    return found


def _plain(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return as_json(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value
