"""Scores to the bytes of a ModelInferResponse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tessera.serving.package.schema import OutputSpec
from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.server.request.decoded_request import Answer
from tessera.serving.server.request.infer_regions import Place


class InferEncoder:
    """Encodes one model's answers.

    Args:
        outputs: the model's outputs.
        model_name: said in every answer.
        model_version: said in every answer.
        follows: whether answers say with which commit they were computed.
    """

    def __init__(
        self,
        outputs: Sequence[OutputSpec],
        *,
        model_name: str,
        model_version: str,
        follows: bool = False,
    ) -> None:
        self._follows = follows
        self._widths = {output.name: output.width for output in outputs}
        self._name = model_name
        self._version = model_version

    def encode(
        self,
        answer: Answer,
        *,
        samples: int,
        outputs: list[str] | None,
        places: Mapping[str, Place],
        call_id: str,
        decode_seconds: float | None = None,
    ) -> bytes:
        """The message's bytes; what goes elsewhere has been written there.

        Args:
            answer: the scores.
            samples: ``B``.
            outputs: which outputs to tell, in this order; None: all, in the model's.
            places: where outputs go instead of into the message, in which each has then an empty entry, so that
                the entries go on being in the order of the outputs.
            call_id: the request's own name for itself.
            decode_seconds: how long reading the request took, of an answer that tells where its time went, in
                parameters named like the fields of predictor.proto's StageTimings; None: it does not tell.

        Raises:
            ServeError: a place cannot be written to.
        """
        for name, place in places.items():
            place.write(name, answer.outputs[name])
        response = ipb.ModelInferResponse(
            model_name=self._name, model_version=self._version, id=call_id
        )
        if self._follows:
            response.parameters["commit"].int64_param = answer.timings.commit
        if decode_seconds is not None:
            for key, number in _stages(answer, decode_seconds).items():
                response.parameters[key].int64_param = number
        for name in self._widths if outputs is None else outputs:
            width = self._widths[name]
            shape = [samples] if width == 1 else [samples, width]
            response.outputs.add(name=name, datatype="FP32", shape=shape)
            response.raw_output_contents.append(b"" if name in places else answer.outputs[name])
        return response.SerializeToString()


def _stages(answer: Answer, decode_seconds: float) -> dict[str, int]:
    timings = answer.timings
    seconds = {
        "decode": decode_seconds,
        "queue": answer.queue_seconds,
        "assemble": timings.assemble,
        "transfer": timings.transfer,
        "forward": timings.forward,
        "split": timings.split,
    }
    return {f"{stage}_us": round(spent * 1e6) for stage, spent in seconds.items()} | {
        "batch_requests": timings.requests,
        "batch_samples": timings.samples,
    }
