"""The tensors of a ModelInferRequest: names, data types, shapes, and what they contain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.server.errors import InvalidRequestError
from tessera.serving.server.request.infer_regions import RequestRegions
from tessera.serving.server.request.strings import STRING_HEAD_BYTES, split_raw
from tessera.serving.server.request.wire import F32_WIRE, I32_WIRE, I64_WIRE, GroupNames

DENSE = "float_features"
PLAIN = GroupNames.of_tensors("id_list_features")
SCORED = GroupNames.of_tensors("id_score_list_features")

_LARGEST_DIMENSION = (1 << 31) - 1
"""More than a message can hold; the elements of two such dimensions can still be counted."""

STRINGS = "BYTES"
"""The datatype of values that are given as strings."""

_STRING_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class Tensor:
    """One of ``forward``'s arguments.

    Attributes:
        name: the argument's.
        group: what the schema calls the features that it belongs to.
        datatypes: those that a request may choose from, the one to be preferred first.
        rank: dimensions of its shape.
    """

    name: str
    group: str
    datatypes: tuple[str, ...]
    rank: int = 1


TENSORS = (
    Tensor(DENSE, DENSE, ("FP32",), rank=2),
    Tensor(PLAIN.lengths, PLAIN.num_features, ("INT32",)),
    Tensor(PLAIN.values, PLAIN.num_features, ("INT64", "INT32", STRINGS)),
    Tensor(SCORED.lengths, SCORED.num_features, ("INT32",)),
    Tensor(SCORED.values, SCORED.num_features, ("INT64", "INT32", STRINGS)),
    Tensor(SCORED.weights, SCORED.num_features, ("FP32",)),
)
"""In ``forward``'s order."""

TENSOR_BY_NAME = {tensor.name: tensor for tensor in TENSORS}

_NUMBERS: dict[str, tuple[np.dtype[Any], str]] = {
    "FP32": (F32_WIRE, "fp32_contents"),
    "INT32": (I32_WIRE, "int_contents"),
    "INT64": (I64_WIRE, "int64_contents"),
}


@dataclass(frozen=True, slots=True)
class GivenTensor:
    """An input of a request, whose number of elements its shape has confirmed.

    ``content`` has its elements as numbers, ``strings`` those of the datatype BYTES.  ``copied_bytes`` is what typed
    contents take as numbers, a string as the id that is made of it.
    """

    datatype: str
    shape: list[int]
    elements: int
    content: bytes
    copied_bytes: int = 0
    strings: Sequence[bytes] | None = None


def read_tensor(
    expected: Tensor,
    tensor: ipb.ModelInferRequest.InferInputTensor,
    raw: bytes | RequestRegions | None,
    most_ids: int,
) -> GivenTensor:
    """Check what a request says of an input, and give its elements.

    Args:
        expected: the input of the model.
        tensor: as it came.
        raw: its raw contents, or the shared memory in which it lies; None: its contents are typed.
        most_ids: more strings than these are refused before they are looked at.

    Raises:
        InvalidRequestError: naming the tensor and both numbers.
        ServeError: its shared memory is not there.
    """
    name, datatype = tensor.name, tensor.datatype
    if datatype not in expected.datatypes:
        raise InvalidRequestError(
            f"{name} has datatype '{datatype}', expected {' or '.join(expected.datatypes)}"
        )
    shape = list(tensor.shape)
    if len(shape) != expected.rank:
        raise InvalidRequestError(
            f"{name}.shape has {len(shape)} dimensions, expected {expected.rank}"
        )
    for at, size in enumerate(shape):
        if not 0 <= size <= _LARGEST_DIMENSION:
            raise InvalidRequestError(
                f"{name}.shape[{at}] is {size}, expected 0 to {_LARGEST_DIMENSION}"
            )
    elements = math.prod(shape)
    # Before strings are looked for one by one.
    if datatype == STRINGS and elements > most_ids:
        raise InvalidRequestError(f"the request has {elements} ids, the limit is {most_ids}")
    untyped = None if raw is None else _untyped(tensor, raw, elements)
    if datatype == STRINGS:
        strings = _read_strings(name, tensor.contents, untyped, elements)
        return GivenTensor(datatype, shape, elements, b"", _STRING_ID_BYTES * elements, strings)
    if untyped is None:
        content = _read_contents(name, datatype, tensor.contents, elements)
        return GivenTensor(datatype, shape, elements, content, len(content))
    return GivenTensor(datatype, shape, elements, untyped)


def _untyped(
    tensor: ipb.ModelInferRequest.InferInputTensor, raw: bytes | RequestRegions, elements: int
) -> bytes:
    """The contents of a tensor whose contents are not typed; numbers of the right size."""
    name, datatype = tensor.name, tensor.datatype
    beside = "shared memory" if isinstance(raw, RequestRegions) else "raw_input_contents"
    if tensor.contents.ListFields():
        raise InvalidRequestError(
            f"{name} has typed contents beside {beside}, expected only one of the two"
        )
    size = raw.size_of(tensor) if isinstance(raw, RequestRegions) else len(raw)
    if datatype != STRINGS and size != (expected := elements * _NUMBERS[datatype][0].itemsize):
        raise InvalidRequestError(
            f"{name} has {size} bytes, expected {expected} (its shape has {elements} {datatype} "
            "elements)"
        )
    return raw.content_of(tensor) if isinstance(raw, RequestRegions) else raw


def _read_strings(
    name: str,
    contents: ipb.InferTensorContents,
    raw: bytes | None,
    elements: int,
) -> Sequence[bytes]:
    if raw is None:
        return _typed(name, contents, "bytes_contents", elements)
    strings = split_raw(raw, elements)
    if strings is None:
        raise InvalidRequestError(
            f"{name} has {len(raw)} bytes, which are not {elements} strings, each after its size "
            f"in {STRING_HEAD_BYTES} bytes"
        )
    return strings


def _read_contents(
    name: str, datatype: str, contents: ipb.InferTensorContents, elements: int
) -> bytes:
    dtype, field = _NUMBERS[datatype]
    numbers = _typed(name, contents, field, elements)
    return np.fromiter(numbers, dtype, elements).tobytes()


def _typed(
    name: str, contents: ipb.InferTensorContents, field: str, elements: int
) -> Sequence[Any]:
    """The ``elements`` of the one field of typed contents that may be filled."""
    for other, _ in contents.ListFields():
        if other.name != field:
            raise InvalidRequestError(f"{name} has contents in {other.name}, expected only {field}")
    numbers: Sequence[Any] = getattr(contents, field)
    if len(numbers) != elements:
        raise InvalidRequestError(f"{name} has {len(numbers)} elements, its shape has {elements}")
    return numbers
