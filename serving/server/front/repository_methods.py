"""RepositoryIndex, RepositoryModelLoad and RepositoryModelUnload: their messages, and the same as JSON.

What they do is in `RepositoryCalls`; who speaks to the client is `grpc_front` or `http_front`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from tessera.serving.package.strict_json import read_strictly
from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.repository.changes import LoadRequest
from tessera.serving.repository.names import (
    LABEL_RULE,
    is_label,
    is_version,
    parse_state,
    parse_version,
)
from tessera.serving.repository.plan import VersionState
from tessera.serving.server.batching.workers import refusal_of
from tessera.serving.server.errors import InvalidRequestError, ServeError
from tessera.serving.server.front.wire_protocol import invalid_message
from tessera.serving.server.repository.calls import RepositoryCalls
from tessera.serving.server.repository.model_versions import IndexRow

MAX_BODY_BYTES = 64 * 1024
"""What the body of a request over HTTP may have."""

_LOAD_KEYS = ("version", "label", "rollback")
# Triton's client always sends the second; no model here has dependents.
_UNLOAD_KEYS = ("version", "unload_dependents")

Parameters = Mapping[str, Any]


class RepositoryMethods:
    """Answers the calls about repositories.

    Args:
        calls: makes the changes.
        index: gives every version of every model.
        log: where bugs go.
    """

    def __init__(
        self, calls: RepositoryCalls, index: Callable[[], Sequence[IndexRow]], log: Any
    ) -> None:
        self._calls = calls
        self._index = index
        self._log = log
        self._methods: dict[str, tuple[Any, Callable[[Any], Any]]] = {
            "RepositoryIndex": (ipb.RepositoryIndexRequest, self._tell_index),
            "RepositoryModelLoad": (ipb.RepositoryModelLoadRequest, self._load),
            "RepositoryModelUnload": (ipb.RepositoryModelUnloadRequest, self._unload),
        }

    def methods(self) -> list[str]:
        """The calls that `answer` knows."""
        return list(self._methods)

    async def answer(self, method: str, content: bytes) -> bytes:
        """The response of one call over gRPC.

        Raises:
            ServeError: the status to answer with.
        """
        kind, call = self._methods[method]
        try:
            request = kind.FromString(content)
        except DecodeError as error:
            raise invalid_message(content, f"{method}Request", error) from None
        if request.repository_name:
            raise InvalidRequestError(
                f"repository_name is {request.repository_name!r}, expected '': the models given at "
                "start are the only repository"
            )
        try:
            response: bytes = (await call(request)).SerializeToString()
        except ServeError:
            raise
        except Exception as failure:
            raise refusal_of(self._log, failure) from failure
        return response

    async def _tell_index(self, request: ipb.RepositoryIndexRequest) -> ipb.RepositoryIndexResponse:
        response = ipb.RepositoryIndexResponse()
        for row in self._rows(ready=request.ready):
            response.models.add(
                name=row.model, version=row.version, state=row.state.value, reason=row.reason
            )
        return response

    async def _load(
        self, request: ipb.RepositoryModelLoadRequest
    ) -> ipb.RepositoryModelLoadResponse:
        await self._calls.load(request.model_name, _load_request(_plain(request.parameters)))
        return ipb.RepositoryModelLoadResponse()

    async def _unload(
        self, request: ipb.RepositoryModelUnloadRequest
    ) -> ipb.RepositoryModelUnloadResponse:
        await self._calls.unload(request.model_name, _unload_version(_plain(request.parameters)))
        return ipb.RepositoryModelUnloadResponse()

    def _rows(self, *, ready: bool) -> list[IndexRow]:
        return [row for row in self._index() if not ready or row.state is VersionState.READY]

    # The same over HTTP.

    def index_json(self, body: bytes) -> str:
        """The index, as JSON.

        Raises:
            ServeError: the body is not what it should be.
        """
        found = _object(body)
        _refuse_others("key", found, ("ready",))
        ready = found.get("ready", False)
        if not isinstance(ready, bool):
            raise InvalidRequestError(f"ready is {ready!r}, expected true or false")
        rows = [
            {"name": row.model, "version": row.version, "state": row.state.value}
            | ({"reason": row.reason} if row.reason else {})
            for row in self._rows(ready=ready)
        ]
        return json.dumps(rows)

    async def load_json(self, name: str, body: bytes) -> None:
        """Load as ``body`` says.

        Raises:
            ServeError: see `RepositoryCalls.load`; or the body is not what it should be.
        """
        await self._calls.load(name, _load_request(_parameters(body)))

    async def unload_json(self, name: str, body: bytes) -> None:
        """Unload as ``body`` says.

        Raises:
            ServeError: see `RepositoryCalls.unload`; or the body is not what it should be.
        """
        await self._calls.unload(name, _unload_version(_parameters(body)))


def _plain(parameters: Mapping[str, ipb.ModelRepositoryParameter]) -> dict[str, Any]:
    """Each parameter's value, of whichever type it was sent."""
    found = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        found[name] = None if kind is None else getattr(parameter, kind)
    return found


def _object(body: bytes) -> dict[str, Any]:
    if not body.strip():
        return {}
    try:
        found = read_strictly(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body ({len(body)} bytes) is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequestError(f"the body ({len(body)} bytes) is not a JSON object")
    return found


def _parameters(body: bytes) -> dict[str, Any]:
    found = _object(body)
    _refuse_others("key", found, ("parameters",))
    parameters = found.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidRequestError("parameters is not a JSON object")
    return parameters


def _refuse_others(what: str, found: Parameters, known: Sequence[str]) -> None:
    for name in found:
        if name not in known:
            expected = ", ".join(f"'{one}'" for one in known)
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise InvalidRequestError(f"{what} '{name}' is unknown, expected {expected}{hint}")


def _load_request(parameters: Parameters) -> LoadRequest:
    _refuse_others("parameter", parameters, _LOAD_KEYS)
    label = parameters.get("label", "")
    if "label" in parameters and not (isinstance(label, str) and is_label(label)):
        raise InvalidRequestError(f"parameter 'label' is {label!r}, expected {LABEL_RULE}")
    to, commit = _rollback(parameters)
    return LoadRequest(
        version=_version(parameters, "version"),
        label=label,
        rollback="rollback" in parameters,
        to=to,
        commit=commit,
    )


def _rollback(parameters: Parameters) -> tuple[int | None, int | None]:
    """The version to go back to, if one is named, and the commit of it, likewise."""
    value = parameters.get("rollback")
    if "rollback" not in parameters or value == "previous":
        return None, None
    state = parse_state(value) if isinstance(value, str) else None
    if state is not None:
        return state
    version = parse_version(value) if isinstance(value, str) else value
    if not isinstance(version, int) or not is_version(version):
        raise InvalidRequestError(
            f"parameter 'rollback' is {value!r}, expected 'previous', a version, or a state such as '3.42'"
        )
    return version, None


def _unload_version(parameters: Parameters) -> int | None:
    _refuse_others("parameter", parameters, _UNLOAD_KEYS)
    return _version(parameters, "version")


def _version(parameters: Parameters, name: str) -> int | None:
    if name not in parameters:
        return None
    value = parameters[name]
    version = parse_version(value) if isinstance(value, str) else value
    if not isinstance(version, int) or not is_version(version):
        raise InvalidRequestError(
            f"parameter '{name}' is {value!r}, expected a version, a positive whole number"
        )
    return version
