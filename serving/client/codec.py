"""What the synchronous and the asyncio client have in common: all but the waiting."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import grpc

from tessera.errors import UserError
from tessera.serving.client.arrays import RequestArrays
from tessera.serving.client.credentials import Credentials
from tessera.serving.client.encode import encode_request
from tessera.serving.client.errors import ServerBug, Unavailable, error_for_status
from tessera.serving.client.prediction import Prediction, decode_response
from tessera.serving.client.retry import Retry
from tessera.serving.package.schema import InputSchema

METHOD = "/predictor.Predictor/Predict"
DEFAULT_TIMEOUT_S = 5.0
# gRPC's own default keeps to the first address that answers.
_IN_TURN: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
# A server that is about to end says so by its health, and is not called any more while it still answers.
_WHILE_HEALTHY = _IN_TURN | {"healthCheckConfig": {"serviceName": ""}}
# gRPC's own 120 s and 30 s are how long a server that came back or was added could be left out.
_SOONEST_MS = 5_000
_BACK_SOON = [
    ("grpc.max_reconnect_backoff_ms", _SOONEST_MS),
    ("grpc.dns_min_time_between_resolutions_ms", _SOONEST_MS),
]

ChannelOptions = Sequence[tuple[str, Any]]

_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "xds:")


_METADATA_NAME = re.compile(r"[0-9a-z_.-]+")
_METADATA_VALUE = re.compile(r"[ -~]*")


def check_metadata(metadata: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """``metadata`` as gRPC takes it; a `UserError` where it has a name or a value that gRPC does not send."""
    for name, value in metadata.items():
        if not _METADATA_NAME.fullmatch(name) or name.endswith("-bin") or name.startswith("grpc-"):
            raise UserError(
                f"metadata has the name {name!r}; give lower-case letters, digits and '_.-', as in 'traceparent', "
                "and neither 'grpc-' in front nor '-bin' at the end"
            )
        if not isinstance(value, str) or not _METADATA_VALUE.fullmatch(value):
            raise UserError(f"metadata['{name}'] is {value!r}; give printable ASCII")
    return tuple(metadata.items())


def check_address(address: str) -> str:
    """``address``; a `UserError` where it is neither ``HOST:PORT`` nor one of gRPC's URI forms."""
    if isinstance(address, str) and address.startswith(_SCHEMES):
        return address
    match = _HOST_PORT.fullmatch(address) if isinstance(address, str) else None
    if match is None or not 0 < int(match["port"]) < 65536:
        raise UserError(
            f"address {address!r} is not HOST:PORT with a port from 1 to 65535,"
            " as in 127.0.0.1:50051"
        )
    return address


def check_timeout(timeout_s: float) -> float:
    """``timeout_s``; a `UserError` where it is not a positive number of seconds."""
    if not isinstance(timeout_s, Real) or not timeout_s > 0:
        raise UserError(f"timeout_s is {timeout_s!r}; it must be a positive number of seconds")
    return timeout_s


def _balancing(address: str) -> tuple[str, str]:
    """The option that shares calls between servers.

    Health is asked for where a URI may name several: a single server is called as long as it answers.
    """
    config = _WHILE_HEALTHY if address.startswith(_SCHEMES) else _IN_TURN
    return "grpc.service_config", json.dumps(config)


class Client:
    """A connection to a Tessera (or TorchRec) inference server.

    Args:
        address: ``HOST:PORT``, or another target form of gRPC's.  Nothing is sent until the
            first call.  Where a name stands for several servers (``dns:///NAME:PORT``, or
            ``ipv4:A:PORT,B:PORT``) they are called in turn, as long as their health is SERVING.
        schema: the model's inputs (`read_schema` takes them from a package).  With it, names,
            order, widths and dtypes are checked before anything is sent.
        timeout_s: the time limit of a call that gives none, in seconds.
        retry: send again after UNAVAILABLE; None (the default) never does.
        compact_ids: send int64 ids as int32 where they fit.
        credentials: files of certificates and of a token, see `Credentials`; None: the connection is not
            encrypted, and no token is shown.
        options: further gRPC channel options.

    Raises:
        UserError: the address, the schema, the timeout or a file of ``credentials`` cannot be used.
    """

    _open: Callable[..., Any]
    """``grpc.insecure_channel`` or its asyncio twin."""
    _open_secure: Callable[..., Any]
    """``grpc.secure_channel`` or its asyncio twin."""

    def __init__(
        self,
        address: str,
        *,
        schema: InputSchema | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: Retry | None = None,
        compact_ids: bool = False,
        credentials: Credentials | None = None,
        options: ChannelOptions = (),
    ) -> None:
        if schema is not None and not isinstance(schema, InputSchema):
            raise UserError(
                f"schema is {schema!r}; give what read_schema('model.pt') returns, or None"
            )
        self._address = check_address(address)
        self._schema = schema
        self._timeout_s = check_timeout(timeout_s)
        self._retry = retry or Retry(attempts=1)
        self._compact_ids = compact_ids
        self._rng = random.Random()  # noqa: S311 - spreads retries, guards nothing
        # The server limits the size of messages; a second limit here would only hide its message.
        sizes = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
        credentials = credentials or Credentials()
        self._metadata = credentials.metadata()
        self._channel = credentials.channel(
            address,
            [*sizes, *_BACK_SOON, _balancing(address), *options],
            self._open,
            self._open_secure,
        )
        # Bytes pass through: encoding is a step of its own, which load generators do ahead.
        self._call = self._channel.unary_unary(METHOD, None, None)

    def known_schema(self) -> InputSchema:
        """The schema that the client was made with; a `UserError` where it has none."""
        if self._schema is None:
            raise UserError(
                "rows need the model's schema; make the client with schema=read_schema('model.pt')"
            )
        return self._schema

    def _metadata_of(self, metadata: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
        """What a call carries: the token, and what is its own."""
        return (*self._metadata, *check_metadata(metadata)) if metadata else self._metadata

    def _encode(
        self, arrays: RequestArrays, model: str, version: str, traffic_key: str, priority: int
    ) -> bytes:
        return encode_request(
            arrays,
            model=model,
            version=version,
            traffic_key=traffic_key,
            priority=priority,
            compact_ids=self._compact_ids,
        )

    def _decode(self, data: bytes, batch_size: int) -> Prediction:
        try:
            return decode_response(data, batch_size)
        except ValueError as error:
            raise ServerBug(grpc.StatusCode.INTERNAL, str(error), self._address) from error

    def _attempts(self, timeout_s: float | None) -> _Attempts:
        limit_s = self._timeout_s if timeout_s is None else check_timeout(timeout_s)
        return _Attempts(self._address, limit_s, self._retry.waits_s(self._rng))


class _Attempts:
    """One call's time limit, and the waits between its attempts."""

    def __init__(self, address: str, limit_s: float, waits_s: Iterator[float]) -> None:
        self._address = address
        self._deadline = time.monotonic() + limit_s
        self._waits_s = waits_s

    def remaining_s(self) -> float:
        """What is left of the time limit."""
        return max(0.0, self._deadline - time.monotonic())

    def wait_s(self, rpc_error: Any) -> float:
        """The seconds before the next attempt; a `PredictError` where there is to be none."""
        error = error_for_status(rpc_error.code(), rpc_error.details(), self._address)
        wait_s = next(self._waits_s, None) if isinstance(error, Unavailable) else None
        if wait_s is None or wait_s >= self.remaining_s():
            raise error from rpc_error
        return wait_s
