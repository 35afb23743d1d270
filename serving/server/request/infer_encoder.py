"""Scores to the bytes of a ModelInferResponse."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.serving.package.schema import OutputSpec
from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.server.request.decoded_request import Answer


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
        self, answer: Answer, *, samples: int, outputs: list[str] | None, call_id: str
    ) -> bytes:
        """The message's bytes.

        Args:
            answer: the scores.
            samples: ``B``.
            outputs: which outputs to tell, in this order; None: all, in the model's.
            call_id: the request's own name for itself.
        """
        response = ipb.ModelInferResponse(
            model_name=self._name, model_version=self._version, id=call_id
        )
        if self._follows:
            response.parameters["commit"].int64_param = answer.timings.commit
        for name in self._widths if outputs is None else outputs:
            width = self._widths[name]
            shape = [samples] if width == 1 else [samples, width]
            response.outputs.add(name=name, datatype="FP32", shape=shape)
            response.raw_output_contents.append(answer.outputs[name])
        return response.SerializeToString()
