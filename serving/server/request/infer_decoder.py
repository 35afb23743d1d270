"""A ModelInferRequest to what `RequestDecoder` takes: names, types, shapes and parameters.

What is left to be checked once the tensors fit together (lengths, ids, numbers, limits) is what
Predict checks, too, and is checked by the same code.

Legend: ``B`` samples, ``F`` features of a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.serving.package.schema import InputSchema
from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.server.config import ModelLimits
from tessera.serving.server.errors import InvalidRequestError
from tessera.serving.server.request.decoded_request import DecodedRequest
from tessera.serving.server.request.decoder import RequestDecoder, RequestNames
from tessera.serving.server.request.infer_tensors import (
    DENSE,
    PLAIN,
    SCORED,
    TENSOR_BY_NAME,
    TENSORS,
    GivenTensor,
    Tensor,
    read_tensor,
)
from tessera.serving.server.request.wire import GroupNames

_TENSOR_NAMES = RequestNames(DENSE, PLAIN, SCORED)

LOWEST_PRIORITY = (1 << 31) - 1
"""The priority of a request that names none; the numbers from 1 on come before it."""


def inputs_of(schema: InputSchema) -> list[Tensor]:
    """The tensors that a model with this schema needs, in ``forward``'s order."""
    features = _features(schema)
    return [tensor for tensor in TENSORS if features[tensor.group]]


@dataclass(frozen=True, slots=True)
class InferWork:
    """A checked request.

    Attributes:
        request: its samples.
        priority: higher is served first.
        timeout_s: seconds from its arrival within which the work must have begun, or infinity.
        copied_bytes: of typed contents as plain numbers, and of the ids of strings.
        outputs: the outputs that it asks for, in its order; None: all.
    """

    request: DecodedRequest
    priority: int
    timeout_s: float
    copied_bytes: int
    outputs: list[str] | None


class InferDecoder:
    """Checks ModelInferRequests against one model's schema and limits.

    Args:
        schema: what the model takes and gives.
        limits: see `RequestDecoder`.
        shares_rows: see `RequestDecoder`.
    """

    def __init__(
        self, schema: InputSchema, limits: ModelLimits, *, shares_rows: bool = False
    ) -> None:
        self._decoder = RequestDecoder(schema, limits, shares_rows=shares_rows, names=_TENSOR_NAMES)
        self._features = _features(schema)
        self._most_ids = limits.max_request_ids
        self._inputs = [tensor.name for tensor in inputs_of(schema)]
        self._outputs = [output.name for output in schema.outputs]

    def decode(self, message: ipb.ModelInferRequest) -> InferWork:
        """Check ``message`` and give its arrays.

        Raises:
            InvalidRequestError: naming the tensor or parameter and both numbers.
        """
        timeout_us = _read_number(message.parameters, "timeout", (1 << 63) - 1)
        priority = _read_number(message.parameters, "priority", LOWEST_PRIORITY - 1)
        _refuse_sequence(message.parameters)
        given = self._read_inputs(message)
        self._check_groups(given)
        flat = self._flatten(given)
        outputs = self._read_outputs(message.outputs)
        return InferWork(
            self._decoder.decode(flat),
            LOWEST_PRIORITY - priority if priority else 0,
            timeout_us / 1e6 if timeout_us else math.inf,
            sum(
                one.number_bytes
                for one in given.values()
                if one.strings is not None or not message.raw_input_contents
            ),
            outputs,
        )

    def _read_inputs(self, message: ipb.ModelInferRequest) -> dict[str, GivenTensor]:
        raw: Sequence[bytes] = message.raw_input_contents
        if raw and len(raw) != len(message.inputs):
            raise InvalidRequestError(
                f"raw_input_contents has {len(raw)} entries, expected {len(message.inputs)}: one "
                "for each input"
            )
        given: dict[str, GivenTensor] = {}
        for at, tensor in enumerate(message.inputs):
            if tensor.name not in TENSOR_BY_NAME:
                raise InvalidRequestError(
                    f"input '{tensor.name}' is unknown; this model has {_listed(self._inputs)}"
                )
            if tensor.name in given:
                raise InvalidRequestError(f"input '{tensor.name}' is given twice")
            _refuse_parameters("input", tensor.name, tensor.parameters)
            given[tensor.name] = read_tensor(
                TENSOR_BY_NAME[tensor.name], tensor, raw[at] if raw else None, self._most_ids
            )
        return given

    def _check_groups(self, given: dict[str, GivenTensor]) -> None:
        for tensor in TENSORS:
            name = tensor.name
            if self._features[tensor.group]:
                if name not in given:
                    raise InvalidRequestError(f"input {name!r} is missing")
            elif name in given and given[name].elements:
                raise InvalidRequestError(
                    f"{name} has {given[name].elements} elements, expected 0: the model has no "
                    f"{tensor.group}"
                )

    def _flatten(self, given: dict[str, GivenTensor]) -> pb.PredictionRequest:
        """The tensors as the fields of the message that the decoder knows."""
        flat = pb.PredictionRequest()
        B: int | None = None
        dense = self._features[DENSE]
        if dense:
            B, width = given[DENSE].shape
            if width != dense:
                raise InvalidRequestError(
                    f"{DENSE}.shape[1] is {width}, the model has {dense} dense features"
                )
            flat.float_features.num_features = dense
            flat.float_features.values = given[DENSE].content
        groups = ((PLAIN, flat.id_list_features), (SCORED, flat.id_score_list_features))
        for names, group in groups:
            F = self._features[names.num_features]
            if F:
                B = _samples(names.lengths, given[names.lengths].elements, F, B)
                group.num_features = F
                _fill(group, names, given)
        # A model without inputs of its own cannot be told how many samples it has.
        flat.batch_size = B or 0
        return flat

    def _read_outputs(
        self, asked: Sequence[ipb.ModelInferRequest.InferRequestedOutputTensor]
    ) -> list[str] | None:
        if not asked:
            return None
        names: list[str] = []
        for output in asked:
            if output.name not in self._outputs:
                raise InvalidRequestError(
                    f"output '{output.name}' is unknown; this model has {_listed(self._outputs)}"
                )
            if output.name in names:
                raise InvalidRequestError(f"output '{output.name}' is asked for twice")
            _refuse_parameters("output", output.name, output.parameters)
            names.append(output.name)
        return names


def _features(schema: InputSchema) -> dict[str, int]:
    """How many features each group has."""
    return {
        DENSE: len(schema.dense_features),
        PLAIN.num_features: len(schema.group("id_list")),
        SCORED.num_features: len(schema.group("id_score_list")),
    }


def _samples(name: str, elements: int, F: int, B: int | None) -> int:
    """How many samples ``elements`` lengths are for."""
    if B is None:
        if elements % F:
            raise InvalidRequestError(
                f"{name} has {elements} elements, expected a multiple of {F} features"
            )
        return elements // F
    if elements != F * B:
        raise InvalidRequestError(
            f"{name} has {elements} elements, expected {F * B} ({F} features of {B} samples)"
        )
    return B


def _fill(group: pb.SparseFeatures, names: GroupNames, given: dict[str, GivenTensor]) -> None:
    group.lengths = given[names.lengths].content
    values = given[names.values]
    if values.strings is not None:
        group.values_bytes.extend(values.strings)
    elif values.datatype == "INT64":
        group.values_int64 = values.content
    else:
        group.values = values.content
    if names.weights in given:
        group.weights = given[names.weights].content


_Parameters = Any  # a map of InferParameter; its generated type cannot be named


def _number(parameter: ipb.InferParameter) -> int | None:
    """The parameter's value where it is a whole number."""
    kind = parameter.WhichOneof("parameter_choice")
    if kind == "int64_param":
        return parameter.int64_param
    if kind == "uint64_param":
        return parameter.uint64_param
    return None


def _read_number(parameters: _Parameters, name: str, most: int) -> int:
    """The parameter's value, 0 where it is not there."""
    if name not in parameters:
        return 0
    number = _number(parameters[name])
    if number is None:
        raise InvalidRequestError(
            f"parameter {name!r} is neither an int64_param nor a uint64_param"
        )
    if not 0 <= number <= most:
        raise InvalidRequestError(f"parameter {name!r} is {number}, expected 0 to {most}")
    return number


def _refuse_sequence(parameters: _Parameters) -> None:
    if "sequence_id" not in parameters:
        return
    sequence = parameters["sequence_id"]
    if sequence.WhichOneof("parameter_choice") == "string_param":
        unused = not sequence.string_param
    else:
        unused = _number(sequence) == 0
    if not unused:
        raise InvalidRequestError(
            "parameter 'sequence_id' is not supported: models keep no state between requests"
        )


def _refuse_parameters(kind: str, name: str, parameters: _Parameters) -> None:
    """Where the data lies elsewhere, or is asked for in another form."""
    refused = min(
        (key for key in parameters if key == "classification" or key.startswith("shared_memory_")),
        default=None,
    )
    if refused is not None:
        raise InvalidRequestError(f"parameter '{refused}' of {kind} '{name}' is not supported")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
