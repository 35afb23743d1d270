"""A ModelInferRequest to what `RequestDecoder` takes: names, types, shapes and parameters.

What is left to be checked once the tensors fit together (lengths, ids, numbers, limits) is what
Predict checks, too, and is checked by the same code.

Legend: ``B`` samples, ``F`` features of a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tessera.serving.package.schema import InputSchema
from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.server.config import ModelLimits
from tessera.serving.server.errors import InvalidRequestError
from tessera.serving.server.request.decoded_request import DecodedRequest
from tessera.serving.server.request.decoder import RequestDecoder, RequestNames
from tessera.serving.server.request.infer_parameters import (
    read_flag,
    read_number,
    refuse_sequence,
)
from tessera.serving.server.request.infer_regions import (
    Place,
    RequestRegions,
    check_parameters,
    is_placed,
)
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
from tessera.serving.server.request.wire import F32_WIRE, GroupNames

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
        copied_bytes: of typed contents as plain numbers, of the ids of strings, and of what was in shared memory.
        outputs: the outputs that it asks for, in its order; None: all.
        timings: whether the answer tells where its time went.
    """

    request: DecodedRequest
    priority: int
    timeout_s: float
    copied_bytes: int
    outputs: list[str] | None
    timings: bool


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
        self._widths = {output.name: output.width for output in schema.outputs}

    def decode(self, message: ipb.ModelInferRequest, regions: RequestRegions) -> InferWork:
        """Check ``message`` and give its arrays.

        Raises:
            InvalidRequestError: naming the tensor or parameter and both numbers.
            ServeError: a tensor's shared memory is not there.
        """
        timeout_us = read_number(message.parameters, "timeout", (1 << 63) - 1)
        priority = read_number(message.parameters, "priority", LOWEST_PRIORITY - 1)
        refuse_sequence(message.parameters)
        timings = read_flag(message.parameters, "timings")
        given = self._read_inputs(message, regions)
        self._check_groups(given)
        flat = self._flatten(given)
        outputs = self._read_outputs(message.outputs, regions)
        return InferWork(
            self._decoder.decode(flat),
            LOWEST_PRIORITY - priority if priority else 0,
            timeout_us / 1e6 if timeout_us else math.inf,
            regions.copied_bytes + sum(one.copied_bytes for one in given.values()),
            outputs,
            timings,
        )

    def place_outputs(
        self, message: ipb.ModelInferRequest, regions: RequestRegions, samples: int
    ) -> dict[str, Place]:
        """Where outputs of a decoded request go that do not go into the answer, by their names.

        Raises:
            ServeError: there is no such region, or it has no room or must not be written to.
        """
        places: dict[str, Place] = {}
        for output in message.outputs:
            if is_placed(output.parameters):
                size = samples * self._widths[output.name] * F32_WIRE.itemsize
                places[output.name] = regions.place_of(output.name, output.parameters, size)
        return places

    def _read_inputs(
        self, message: ipb.ModelInferRequest, regions: RequestRegions
    ) -> dict[str, GivenTensor]:
        raw = _raw_contents(message, regions)
        given: dict[str, GivenTensor] = {}
        for tensor in message.inputs:
            if tensor.name not in TENSOR_BY_NAME:
                raise InvalidRequestError(
                    f"input '{tensor.name}' is unknown; this model has {_listed(self._inputs)}"
                )
            if tensor.name in given:
                raise InvalidRequestError(f"input '{tensor.name}' is given twice")
            check_parameters("input", tensor.name, tensor.parameters, may_be_placed=regions.allowed)
            expected = TENSOR_BY_NAME[tensor.name]
            if is_placed(tensor.parameters):
                given[tensor.name] = read_tensor(expected, tensor, regions, self._most_ids)
            else:
                # An entry that is missing is refused by its size, as an empty one is.
                content = None if raw is None else next(raw, b"")
                given[tensor.name] = read_tensor(expected, tensor, content, self._most_ids)
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
        self,
        asked: Sequence[ipb.ModelInferRequest.InferRequestedOutputTensor],
        regions: RequestRegions,
    ) -> list[str] | None:
        if not asked:
            return None
        names: list[str] = []
        for output in asked:
            if output.name not in self._widths:
                raise InvalidRequestError(
                    f"output '{output.name}' is unknown; this model has {_listed(list(self._widths))}"
                )
            if output.name in names:
                raise InvalidRequestError(f"output '{output.name}' is asked for twice")
            check_parameters(
                "output", output.name, output.parameters, may_be_placed=regions.allowed
            )
            names.append(output.name)
        return names


def _raw_contents(
    message: ipb.ModelInferRequest, regions: RequestRegions
) -> Iterator[bytes] | None:
    """The contents of the inputs that are not in shared memory, in their order; None: they are typed."""
    raw: Sequence[bytes] = message.raw_input_contents
    placed = sum(is_placed(tensor.parameters) for tensor in message.inputs)
    expected = len(message.inputs) - placed
    # What is in shared memory and must not be there is refused by its name.
    if raw and len(raw) != expected and (regions.allowed or not placed):
        which = " that is not in shared memory" if placed else ""
        raise InvalidRequestError(
            f"raw_input_contents has {len(raw)} entries, expected {expected}: one for each input{which}"
        )
    return iter(raw) if raw else None


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


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
