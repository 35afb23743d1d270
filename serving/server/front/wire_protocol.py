"""The wire protocols in which scores are asked for: from a call's bytes to a request and back.

Everything between the two, and everything that is counted, is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import DecodeError

from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.repository.choice import MAX_TRAFFIC_KEY_BYTES
from tessera.serving.server.errors import InvalidRequestError
from tessera.serving.server.model.registry import Key, Registry
from tessera.serving.server.model.served_model import ServedModel
from tessera.serving.server.request.decoded_request import NO_DEADLINE, Answer, DecodedRequest
from tessera.serving.server.request.infer_regions import RequestRegions
from tessera.serving.server.request.shared_memory import SharedMemory

_STRING_ID_BYTES = 8
"""What the id of a value takes that came as a string."""


@dataclass(slots=True, eq=False)
class DecodedCall:
    """A call whose request has been checked.

    Attributes:
        request: its samples.
        priority: higher is served first.
        timeout_s: seconds from the call's arrival within which the work must have begun, or
            infinity; beside the deadline that gRPC knows.
        copied_bytes: bytes that decoding makes beside the message, and the pooled vectors of shared rows; a
            short message can ask for many.
        encode: from the scores, and the seconds that decoding took, to the response's bytes.
        key: gives what decides between versions, and whether a shadow computes the call, too.
        decode_for: the request as another version takes it; raises `InvalidRequestError` where it does not.
    """

    request: DecodedRequest
    priority: int
    timeout_s: float
    copied_bytes: int
    encode: Callable[[Answer, float], bytes]
    key: Key
    decode_for: Callable[[ServedModel], DecodedRequest]


class WireProtocol(Protocol):
    """What differs between the wire protocols that a model is called by.

    Attributes:
        method: the call's name.
    """

    method: str

    def open(
        self, content: bytes, registry: Registry, key: Key
    ) -> tuple[ServedModel, Callable[[], DecodedCall]]:
        """The model that a call asks for, and what checks the rest of its request.

        Args:
            content: the message.
            registry: the models.
            key: gives what decides between versions where the message does not say.

        Raises:
            InvalidRequestError: the bytes are not a valid message; the returned function raises it for the
                rest of the request.
            ServeError: see `Registry.find`.
        """
        ...


class PredictProtocol:
    """``predictor.Predictor``'s Predict."""

    method = "Predict"

    def open(
        self, content: bytes, registry: Registry, key: Key
    ) -> tuple[ServedModel, Callable[[], DecodedCall]]:
        """The model that a Predict call asks for, and what checks the rest of its request."""
        try:
            message = pb.PredictionRequest.FromString(content)
        except DecodeError as error:
            raise invalid_message(content, "PredictionRequest", error) from None
        key = traffic_key("traffic_key", message.traffic_key) or key
        model = registry.find(message.model_name, message.model_version, key)

        def read() -> DecodedCall:
            request = model.decoder.decode(message)
            copied = _STRING_ID_BYTES * _strings_of(message)
            if message.HasField("shared_features"):
                copied = 4 * request.id_list.lengths.size + 8 * request.id_list.values.size
                copied += model.shared_bytes(message.shared_features)
            return DecodedCall(
                request,
                message.priority,
                NO_DEADLINE,
                copied,
                model.encoder.encode,
                key,
                lambda other: other.decoder.decode(message),
            )

        return model, read


class InferProtocol:
    """``inference.GRPCInferenceService``'s ModelInfer.

    Args:
        memory: where its tensors may be; None: in its messages alone.
    """

    method = "ModelInfer"

    def __init__(self, memory: SharedMemory | None = None) -> None:
        self._memory = memory

    def open(
        self, content: bytes, registry: Registry, key: Key
    ) -> tuple[ServedModel, Callable[[], DecodedCall]]:
        """The model that a ModelInfer call asks for, and what checks the rest of its request."""
        try:
            message = ipb.ModelInferRequest.FromString(content)
        except DecodeError as error:
            raise invalid_message(content, "ModelInferRequest", error) from None
        model = registry.find(message.model_name, message.model_version, _infer_key(message) or key)

        def read() -> DecodedCall:
            regions = RequestRegions(self._memory)
            asked = model.infer_decoder.decode(message, regions)
            samples = asked.request.samples
            places = model.infer_decoder.place_outputs(message, regions, samples)
            call_id = message.id

            def encode(answer: Answer, decode_seconds: float) -> bytes:
                return model.infer_encoder.encode(
                    answer,
                    samples=samples,
                    outputs=asked.outputs,
                    places=places,
                    call_id=call_id,
                    decode_seconds=decode_seconds if asked.timings else None,
                )

            return DecodedCall(
                asked.request,
                asked.priority,
                asked.timeout_s,
                asked.copied_bytes,
                encode,
                key,
                lambda other: other.infer_decoder.decode(message, regions).request,
            )

        return model, read


def traffic_key(field: str, text: str) -> Key | None:
    """What decides between versions for a request that says so itself; None: it does not.

    Raises:
        InvalidRequestError: it is too long.
    """
    content = text.encode()
    if len(content) > MAX_TRAFFIC_KEY_BYTES:
        raise InvalidRequestError(
            f"{field} has {len(content)} bytes, the limit is {MAX_TRAFFIC_KEY_BYTES}"
        )
    return (lambda: content) if content else None


def _infer_key(message: ipb.ModelInferRequest) -> Key | None:
    if "traffic_key" in message.parameters:
        parameter = message.parameters["traffic_key"]
        if parameter.WhichOneof("parameter_choice") != "string_param":
            raise InvalidRequestError("parameter 'traffic_key' is not a string")
        if key := traffic_key("parameter 'traffic_key'", parameter.string_param):
            return key
    call_id = message.id.encode()
    return (lambda: call_id) if call_id else None


def _strings_of(message: pb.PredictionRequest) -> int:
    """How many values a request gives as strings."""
    groups = [message.id_list_features, message.id_score_list_features]
    if message.HasField("shared_features"):
        groups.append(message.shared_features.features)
    return sum(len(group.values_bytes) for group in groups)


def invalid_message(content: bytes, name: str, error: DecodeError) -> InvalidRequestError:
    """The refusal of bytes that are not the message they should be."""
    return InvalidRequestError(f"the message ({len(content)} bytes) is not a valid {name}: {error}")
