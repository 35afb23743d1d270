"""The answer to one request, as numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from google.protobuf.message import DecodeError

from tessera.serving.client.arrays import Array
from tessera.serving.protocol import predictor_pb2 as pb


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Where the server spent the request's time, and what company it had.

    Attributes:
        decode_us, queue_us, assemble_us, transfer_us, forward_us, split_us: the stages, in
            microseconds and in their order.
        batch_requests: requests that shared the batch.
        batch_samples: samples in the batch.
    """

    decode_us: int
    queue_us: int
    assemble_us: int
    transfer_us: int
    forward_us: int
    split_us: int
    batch_requests: int
    batch_samples: int


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the server answered.

    Attributes:
        outputs: each output as float32 ``[B]``, or ``[B, k]`` where it has k values a sample.
        model_name: the model that answered; empty from a server that does not say.
        model_version: the version of that model; empty from a server that does not say.
        model_commit: the commit of the version's log that the scores were computed with; 0: the package itself,
            or the server follows no log.
        timings: the server's stage times; all zero from a server that does not measure.
    """

    outputs: dict[str, Array]
    model_name: str
    model_version: str
    timings: Timings
    model_commit: int = 0


def decode_response(data: bytes, batch_size: int) -> Prediction:
    """Read a serialized ``PredictionResponse`` to a request of ``batch_size`` samples.

    Raises:
        ValueError: the bytes are not such a message, or an output's size is not a positive
            multiple of ``batch_size``.
    """
    try:
        response = pb.PredictionResponse.FromString(data)
    except DecodeError as error:
        raise ValueError(f"the server's answer cannot be read: {error}") from error
    outputs = {}
    for name, vector in response.predictions.items():
        array = np.array(vector.data, dtype=np.float32)
        if array.size == 0 or array.size % batch_size:
            raise ValueError(
                f"output {name!r} has {array.size} values, which do not divide among"
                f" {batch_size} samples"
            )
        outputs[name] = array if array.size == batch_size else array.reshape(batch_size, -1)
    stages = {field.name: getattr(response.timings, field.name) for field in fields(Timings)}
    return Prediction(
        outputs=outputs,
        model_name=response.model_name,
        model_version=response.model_version,
        timings=Timings(**stages),
        model_commit=response.model_commit,
    )
