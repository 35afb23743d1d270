"""`PredictorClient`: numpy in, numpy out, one blocking call."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import grpc

from tessera.serving.client.arrays import Array, BagsLike, RequestArrays, Shared
from tessera.serving.client.assemble import assemble
from tessera.serving.client.codec import Client
from tessera.serving.client.prediction import Prediction
from tessera.serving.client.rows import Rows, rows_to_parts

if TYPE_CHECKING:
    from typing_extensions import Self


class PredictorClient(Client):
    """The client for programs that wait for each answer; see `Client` for the arguments.

    One client may be used by many threads at once; they share its connection.  Close it, or
    use it as a context manager:

        with PredictorClient("127.0.0.1:50051", schema=read_schema("model.pt")) as client:
            scores = client.predict(dense, {"C1": [[7], [8, 9]], ...}).outputs["default"]
    """

    _open = staticmethod(grpc.insecure_channel)
    _open_secure = staticmethod(grpc.secure_channel)
    _sleep = staticmethod(time.sleep)

    def predict(
        self,
        dense: Array | Sequence[Sequence[float]] | None,
        sparse: Mapping[str, BagsLike],
        *,
        shared: Shared | None = None,
        model: str = "",
        version: str = "",
        traffic_key: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Prediction:
        """Score ``B`` samples.

        Args:
            dense: ``[B, F]`` floats, NaN where a value is missing; None for a model without.
            sparse: each feature's bags: ``(lengths [B], values [N])`` or ``(lengths, values,
                weights [N])`` as a tuple, or one list of ids per sample, or an integer array
                ``[B]`` or ``[B, k]``.  Without a schema, in the model's order.
            shared: features given once per user, see `Shared`.
            model: the model's name; empty for the server's only or first one.
            version: its version, a number or a label; empty for the server's choice.
            traffic_key: what draws the version where the model's traffic is shared (a user's id,
                say, who then stays on one version); at most 1,024 bytes as UTF-8.  Empty: the
                call's x-request-id, or else the client's IP address.
            priority: a request with a higher number is served first.
            timeout_s: the call's time limit in seconds, retries included; the server drops
                the work when it has passed.
            metadata: what the call carries besides: ``traceparent`` makes its spans children of the caller's
                (docs/observe.md), ``x-request-id`` is its name in logs.  OpenTelemetry's ``inject`` fills such
                a dictionary.

        Raises:
            UserError: the request was wrong and has not been sent.
            PredictError: it brought no answer; the subclass says why.
        """
        arrays = assemble(dense, sparse, shared=shared, schema=self._schema)
        return self.predict_arrays(
            arrays,
            model=model,
            version=version,
            traffic_key=traffic_key,
            priority=priority,
            timeout_s=timeout_s,
            metadata=metadata,
        )

    def predict_rows(
        self,
        rows: Rows,
        *,
        ignore: Collection[str] = (),
        model: str = "",
        version: str = "",
        traffic_key: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Prediction:
        """Score ``B`` rows of raw values, in one request; the client needs the schema.

        Args:
            rows: a list of dictionaries, a pyarrow Table or RecordBatch, or a pandas DataFrame, with the
                columns that training read.  A column that is absent, null or NaN is a missing
                value, or a list without ids.
            ignore: columns of the rows that the model does not take; any other unknown one is refused.
            model: the model's name; empty for the server's only or first one.
            version: its version, a number or a label; empty for the server's choice.
            traffic_key: what draws the version where traffic is shared, see `predict`.
            priority: a request with a higher number is served first.
            timeout_s: the call's time limit in seconds, retries included.
            metadata: what the call carries besides, see `predict`.

        Raises:
            UserError: a row was wrong and nothing has been sent; the message names row and column.
            PredictError: see `predict`.
        """
        dense, sparse = rows_to_parts(rows, self.known_schema(), ignore=ignore)
        return self.predict(
            dense,
            sparse,
            model=model,
            version=version,
            traffic_key=traffic_key,
            priority=priority,
            timeout_s=timeout_s,
            metadata=metadata,
        )

    def predict_arrays(
        self,
        arrays: RequestArrays,
        *,
        model: str = "",
        version: str = "",
        traffic_key: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Prediction:
        """Score a request whose arrays are laid out already, as `RequestDrawer` draws them.

        They are sent as they are, and the server checks them; `PredictError` as of `predict`.
        """
        data = self._encode(arrays, model, version, traffic_key, priority)
        response = self.send(data, timeout_s=timeout_s, metadata=metadata)
        return self._decode(response, arrays.batch_size)

    def send(
        self,
        request: bytes,
        *,
        timeout_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> bytes:
        """Send an encoded ``PredictionRequest``, with `predict`'s errors; the encoded response."""
        carried = self._metadata_of(metadata)
        attempts = self._attempts(timeout_s)
        while True:
            try:
                timeout_s = attempts.remaining_s()
                return bytes(self._call(request, timeout=timeout_s, metadata=carried))
            except grpc.RpcError as error:
                wait_s = attempts.wait_s(error)
            self._sleep(wait_s)

    def close(self) -> None:
        """Close the connection; calls in flight end as CANCELLED.  May be called twice."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
