"""What the synchronous and the asyncio client have in common: all but the waiting."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import grpc

from tessera.errors import UserError
from tessera.serving.client.arrays import Array, BagsLike, RequestArrays, Shared
from tessera.serving.client.assemble import assemble
from tessera.serving.client.encode import encode_request
from tessera.serving.client.errors import ServerBug
from tessera.serving.client.prediction import Prediction, decode_response
from tessera.serving.package.schema import InputSchema

METHOD = "/predictor.Predictor/Predict"
DEFAULT_TIMEOUT_S = 5.0

ChannelOptions = Sequence[tuple[str, Any]]

_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "xds:")


def check_address(address: str) -> str:
    """``address`` itself, if it is ``HOST:PORT`` or one of gRPC's URI forms.

    Raises:
        UserError: it is neither.
    """
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
    """``timeout_s`` itself, if it is a positive number of seconds.

    Raises:
        UserError: it is not.
    """
    if not isinstance(timeout_s, Real) or not timeout_s > 0:
        raise UserError(f"timeout_s is {timeout_s!r}; it must be a positive number of seconds")
    return timeout_s


def channel_options(more: ChannelOptions) -> list[tuple[str, Any]]:
    """The gRPC options of a client channel; those in ``more`` come last and so win.

    The server limits the size of messages; a second limit here would only hide its message.
    """
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        *more,
    ]


class Codec:
    """Turns arguments into bytes and bytes into a `Prediction`.

    Args:
        address: where the bytes go, for error messages.
        schema: the model's inputs, or None to send what is given as it is.
        compact_ids: see `encode_request`.

    Raises:
        UserError: the schema is none.
    """

    def __init__(self, address: str, schema: InputSchema | None, *, compact_ids: bool) -> None:
        if schema is not None and not isinstance(schema, InputSchema):
            raise UserError(
                f"schema is {schema!r}; give what read_schema('model.pt') returns, or None"
            )
        self._address = address
        self._schema = schema
        self._compact_ids = compact_ids

    def assemble(
        self,
        dense: Array | Sequence[Sequence[float]] | None,
        sparse: Mapping[str, BagsLike],
        shared: Shared | None,
    ) -> RequestArrays:
        """Check a request against the schema and lay it out.

        Raises:
            UserError: the request cannot be one of this model's.
        """
        return assemble(dense, sparse, shared=shared, schema=self._schema)

    def encode(self, arrays: RequestArrays, *, model: str, version: str, priority: int) -> bytes:
        """The request's bytes.

        Raises:
            UserError: see `encode_request`.
        """
        return encode_request(
            arrays,
            model=model,
            version=version,
            priority=priority,
            compact_ids=self._compact_ids,
        )

    def decode(self, data: bytes, batch_size: int) -> Prediction:
        """Read an answer.

        Raises:
            ServerBug: ``data`` is not an answer to a request of ``batch_size`` samples.
        """
        try:
            return decode_response(data, batch_size)
        except ValueError as error:
            raise ServerBug(grpc.StatusCode.INTERNAL, str(error), self._address) from error
