"""Scores to the bytes of a PredictionResponse, without building the message.

The scores are bytes already; copying them into a message one float at a time would cost more
than the forward pass of a small request.  The layout is protobuf's wire format: a field is a
tag, and for text, bytes and messages a length, before its content; a number follows its tag.
"""

from __future__ import annotations

from tessera.serving.package.schema import OutputSpec
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.server.request.decoded_request import Answer

_LENGTH_DELIMITED = 2


class ResponseEncoder:
    """Encodes one model's answers.

    Args:
        outputs: the model's outputs.
        model_name: said in every answer.
        model_version: said in every answer.
    """

    def __init__(
        self, outputs: tuple[OutputSpec, ...], *, model_name: str, model_version: str
    ) -> None:
        fields = pb.PredictionResponse.DESCRIPTOR.fields_by_name
        self._predictions = _tag(fields["predictions"].number)
        self._timings = _tag(fields["timings"].number)
        self._commit = _varint(fields["model_commit"].number << 3)
        self._names = [(output.name, _field(1, output.name.encode())) for output in outputs]
        self._model = pb.PredictionResponse(
            model_name=model_name, model_version=model_version
        ).SerializeToString()
        self._scores = _tag(1)
        self._vector = _tag(2)

    def encode(self, answer: Answer, decode_seconds: float) -> bytes:
        """The message's bytes.

        Args:
            answer: scores and stage times.
            decode_seconds: how long this request's decoding took.
        """
        pieces: list[bytes] = []
        for name, name_field in self._names:
            scores = answer.outputs[name]
            vector = self._scores + _varint(len(scores)) + scores
            entry = name_field + self._vector + _varint(len(vector)) + vector
            pieces += (self._predictions, _varint(len(entry)), entry)
        timings = answer.timings
        stages = pb.StageTimings(
            decode_us=round(decode_seconds * 1e6),
            queue_us=round(answer.queue_seconds * 1e6),
            assemble_us=round(timings.assemble * 1e6),
            transfer_us=round(timings.transfer * 1e6),
            forward_us=round(timings.forward * 1e6),
            split_us=round(timings.split * 1e6),
            batch_requests=timings.requests,
            batch_samples=timings.samples,
        ).SerializeToString()
        pieces += (self._model, self._timings, _varint(len(stages)), stages)
        if timings.commit:
            pieces += (self._commit, _varint(timings.commit))
        return b"".join(pieces)


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the high bit says that more follow."""
    if number < 0x80:
        return _SMALL[number]
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_SMALL = [bytes((number,)) for number in range(0x80)]


def _tag(field_number: int) -> bytes:
    return _varint(field_number << 3 | _LENGTH_DELIMITED)


def _field(number: int, content: bytes) -> bytes:
    return _tag(number) + _varint(len(content)) + content
