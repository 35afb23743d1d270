"""`AsyncPredictorClient`: the client for asyncio programs."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import grpc.aio

from tessera.serving.client.arrays import Array, BagsLike, RequestArrays, Shared
from tessera.serving.client.assemble import assemble
from tessera.serving.client.codec import Client
from tessera.serving.client.prediction import Prediction
from tessera.serving.client.rows import Rows, rows_to_parts

if TYPE_CHECKING:
    from typing_extensions import Self


class AsyncPredictorClient(Client):
    """`PredictorClient` for asyncio; arguments, results and errors are the same.

    To be made and used within one running event loop:

        async with AsyncPredictorClient("127.0.0.1:50051", schema=schema) as client:
            answers = await asyncio.gather(*(client.predict(...) for ... in ...))

    Cancelling a call's task cancels the request at the server.
    """

    _open = staticmethod(grpc.aio.insecure_channel)
    _open_secure = staticmethod(grpc.aio.secure_channel)
    _sleep = staticmethod(asyncio.sleep)

    async def predict(
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
        """Score ``B`` samples; see `PredictorClient.predict`."""
        arrays = assemble(dense, sparse, shared=shared, schema=self._schema)
        return await self.predict_arrays(
            arrays,
            model=model,
            version=version,
            traffic_key=traffic_key,
            priority=priority,
            timeout_s=timeout_s,
            metadata=metadata,
        )

    async def predict_rows(
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
        """Score ``B`` rows of raw values; see `PredictorClient.predict_rows`."""
        dense, sparse = rows_to_parts(rows, self.known_schema(), ignore=ignore)
        return await self.predict(
            dense,
            sparse,
            model=model,
            version=version,
            traffic_key=traffic_key,
            priority=priority,
            timeout_s=timeout_s,
            metadata=metadata,
        )

    async def predict_arrays(
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
        """Score a request that is laid out; see `PredictorClient.predict_arrays`."""
        data = self._encode(arrays, model, version, traffic_key, priority)
        response = await self.send(data, timeout_s=timeout_s, metadata=metadata)
        return self._decode(response, arrays.batch_size)

    async def send(
        self,
        request: bytes,
        *,
        timeout_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> bytes:
        """Send an encoded request and return the encoded response; see `PredictorClient.send`."""
        carried = self._metadata_of(metadata)
        attempts = self._attempts(timeout_s)
        while True:
            try:
                timeout_s = attempts.remaining_s()
                return bytes(await self._call(request, timeout=timeout_s, metadata=carried))
            except grpc.aio.AioRpcError as error:
                wait_s = attempts.wait_s(error)
            await self._sleep(wait_s)

    async def close(self) -> None:
        """Close the connection; calls in flight end as CANCELLED.  May be called twice."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
