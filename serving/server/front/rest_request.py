"""A request for scores over REST, JSON with or without binary data behind it, as a ModelInferRequest.

Everything that is asked of tensors, parameters and models is checked where gRPC's requests are; here is what JSON adds:
keys and their types, and elements that must fit their datatype.  docs/rest.md describes the bodies.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.server.errors import InvalidRequestError
from tessera.serving.server.front.rest_json import read_json
from tessera.serving.server.request.infer_regions import is_placed
from tessera.serving.server.request.infer_tensors import STRINGS

_LARGEST_DIMENSION = (1 << 31) - 1
_FLAT, _ROWS = 1, 2
_HEAD = struct.Struct("<I")

Json = dict[str, Any]


@dataclass(slots=True)
class Encodings:
    """Which outputs the client wants as binary data, and which in shared memory.

    Attributes:
        all: those that are not in ``named``.
        named: by the output's name.
        placed: their names.
    """

    all: bool = False
    named: dict[str, bool] = field(default_factory=dict)
    placed: set[str] = field(default_factory=set)

    def is_binary(self, output: str) -> bool:
        """Whether ``output`` travels as binary data."""
        return self.named.get(output, self.all)


@dataclass(frozen=True, slots=True)
class RestRequest:
    """A body that was read.

    Attributes:
        message: a serialised ModelInferRequest with raw contents.
        encodings: of the answer.
    """

    message: bytes
    encodings: Encodings


def read_request(body: bytes, json_bytes: int | None, name: str, version: str) -> RestRequest:
    """What ``body`` asks of a model.

    Args:
        body: JSON, and binary data behind it.
        json_bytes: how many bytes the JSON has; None: all of ``body``.
        name: the model's, from the path.
        version: from the path; empty: none is named.

    Raises:
        InvalidRequestError: naming what is wrong.
    """
    if json_bytes is not None and json_bytes > len(body):
        raise InvalidRequestError(
            f"Inference-Header-Content-Length is {json_bytes}, the body has {len(body)} bytes"
        )
    found = read_json(body if json_bytes is None else body[:json_bytes])
    if not isinstance(found, dict):
        raise InvalidRequestError("the JSON is not an object")
    message = ipb.ModelInferRequest(model_name=name, model_version=version)
    message.id = _string(found.get("id", ""), "id")
    given = _object(found.get("parameters", {}), "parameters")
    everything = _flag(given, "parameter 'binary_data_output'", "binary_data_output")
    encodings = Encodings(bool(everything))
    _add_parameters(message.parameters, given, "binary_data_output")
    reader = _BinaryReader(body, len(body) if json_bytes is None else json_bytes)
    for at, tensor in enumerate(_list(found.get("inputs"), "inputs")):
        _add_input(message, _object(tensor, f"inputs[{at}]"), at, reader)
    reader.refuse_rest()
    for at, output in enumerate(_list(found.get("outputs", []), "outputs")):
        _add_output(message, _object(output, f"outputs[{at}]"), at, encodings)
    return RestRequest(message.SerializeToString(), encodings)


class _BinaryReader:
    """Takes the inputs' binary data from a body, one after the other."""

    def __init__(self, body: bytes, begin: int) -> None:
        self._body = body
        self._at = begin

    def take(self, name: str, size: int) -> bytes:
        left = len(self._body) - self._at
        if size > left:
            raise InvalidRequestError(
                f"input '{name}': binary_data_size is {size}, the body has {left} bytes left"
            )
        self._at += size
        return self._body[self._at - size : self._at]

    def refuse_rest(self) -> None:
        left = len(self._body) - self._at
        if left:
            raise InvalidRequestError(
                f"the body has {left} bytes behind the binary data of its inputs"
            )


def _add_input(message: ipb.ModelInferRequest, given: Json, at: int, reader: _BinaryReader) -> None:
    name = _string(given.get("name"), f"inputs[{at}].name")
    tensor = message.inputs.add(name=name)
    tensor.datatype = _string(given.get("datatype"), f"input '{name}': datatype")
    shape = given.get("shape")
    if not isinstance(shape, list) or not all(_is_whole(size, 64) for size in shape):
        raise InvalidRequestError(f"input '{name}': shape is not a list of whole numbers")
    tensor.shape.extend(shape)
    parameters = _object(given.get("parameters", {}), f"input '{name}': parameters")
    _add_parameters(tensor.parameters, parameters, "binary_data_size")
    if is_placed(parameters):
        if "data" in given or "binary_data_size" in parameters:
            raise InvalidRequestError(
                f"input '{name}' has data and shared memory, expected only one of the two"
            )
    elif "binary_data_size" in parameters:
        if "data" in given:
            raise InvalidRequestError(
                f"input '{name}' has data and binary_data_size, expected only one of the two"
            )
        size = parameters["binary_data_size"]
        if not _is_whole(size, 64) or size < 0:
            raise InvalidRequestError(
                f"input '{name}': binary_data_size is not a whole number from 0 on"
            )
        message.raw_input_contents.append(reader.take(name, size))
    elif "data" in given:
        message.raw_input_contents.append(_contents(name, tensor.datatype, given["data"], shape))
    else:
        raise InvalidRequestError(f"input '{name}' has neither data nor binary_data_size")


def _add_output(message: ipb.ModelInferRequest, given: Json, at: int, encodings: Encodings) -> None:
    name = _string(given.get("name"), f"outputs[{at}].name")
    parameters = _object(given.get("parameters", {}), f"output '{name}': parameters")
    binary = _flag(parameters, f"output '{name}': parameter 'binary_data'", "binary_data")
    if binary is not None:
        encodings.named[name] = binary
    _add_parameters(message.outputs.add(name=name).parameters, parameters, "binary_data")
    if is_placed(parameters):
        encodings.placed.add(name)


def _contents(name: str, datatype: str, data: Any, shape: list[int]) -> bytes:
    """The elements of ``data`` as raw contents; empty for a datatype that no model takes."""
    if not isinstance(data, list):
        raise InvalidRequestError(f"input '{name}': data is not a list")
    kinds = set(map(type, data))
    if list in kinds:
        fits = len(shape) == _ROWS and len(data) == shape[0] and kinds == {list}
        if not fits or any(len(row) != shape[1] for row in data):
            raise InvalidRequestError(f"input '{name}': the lists of data do not have its shape")
        data = [element for row in data for element in row]
        kinds = set(map(type, data))
    if len(shape) in {_FLAT, _ROWS} and all(0 <= size <= _LARGEST_DIMENSION for size in shape):
        elements = shape[0] * shape[-1] if len(shape) == _ROWS else shape[0]
        if len(data) != elements:
            raise InvalidRequestError(f"{name} has {len(data)} elements, its shape has {elements}")
    write = _WRITERS.get(datatype)
    return b"" if write is None else write(name, data, kinds)


def _floats(name: str, data: list[Any], kinds: set[type]) -> bytes:
    if not kinds <= {int, float, type(None)}:
        _refuse_element(name, data, lambda one: type(one) in {int, float, type(None)}, "a number")
    if type(None) in kinds:
        data = [np.nan if one is None else one for one in data]
    with np.errstate(over="ignore"):
        return np.array(data, np.float64).astype("<f4").tobytes()


def _integers(bits: int) -> Any:
    last = (1 << (bits - 1)) - 1

    def write(name: str, data: list[Any], kinds: set[type]) -> bytes:
        if not kinds <= {int} or (data and (max(data) > last or min(data) < -last - 1)):
            what = f"a whole number of {bits} bits"
            _refuse_element(name, data, lambda one: _is_whole(one, bits), what)
        return np.array(data, f"<i{bits // 8}").tobytes()

    return write


def _strings(name: str, data: list[Any], kinds: set[type]) -> bytes:
    if not kinds <= {str}:
        _refuse_element(name, data, lambda one: type(one) is str, "a string")
    encoded = [one.encode() for one in data]
    return b"".join(part for one in encoded for part in (_HEAD.pack(len(one)), one))


_WRITERS: Mapping[str, Any] = {
    "FP32": _floats,
    "INT32": _integers(32),
    "INT64": _integers(64),
    STRINGS: _strings,
}


def _refuse_element(name: str, data: list[Any], is_good: Any, what: str) -> None:
    at = next(at for at, one in enumerate(data) if not is_good(one))
    raise InvalidRequestError(f"input '{name}': element {at} of data is not {what}")


def _is_whole(value: Any, bits: int) -> bool:
    return type(value) is int and -(1 << (bits - 1)) <= value < 1 << (bits - 1)


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{what} is not a string")
    return value


def _object(value: Any, what: str) -> Json:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{what} is not an object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequestError(f"{what} is not a list")
    return value


def _flag(parameters: Json, what: str, key: str) -> bool | None:
    value = parameters.get(key)
    if key in parameters and not isinstance(value, bool):
        raise InvalidRequestError(f"{what} is not true or false")
    return value


def _add_parameters(kept: Any, given: Json, own: str) -> None:
    """Add ``given`` to the message's ``kept``, but for ``own``, which is REST's alone."""
    for key, value in sorted(given.items()):
        if key == own:
            continue
        if isinstance(value, bool):
            kept[key].bool_param = value
        elif isinstance(value, str):
            kept[key].string_param = value
        elif _is_whole(value, 64):
            kept[key].int64_param = value
        elif type(value) is int and 0 < value < 1 << 64:
            kept[key].uint64_param = value
        elif isinstance(value, (int, float)):
            kept[key].double_param = value
        else:
            raise InvalidRequestError(
                f"parameter '{key}' is not a string, a number, or true or false"
            )
