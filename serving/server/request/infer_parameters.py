"""The parameters of a ModelInferRequest that a server must obey or refuse."""

from __future__ import annotations

from typing import Any

from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.server.errors import InvalidRequestError

Parameters = Any
"""A map of InferParameter; its generated type cannot be named."""


def read_number(parameters: Parameters, name: str, most: int) -> int:
    """The parameter's value, 0 where it is not there.

    Raises:
        InvalidRequestError: it is not a whole number from 0 to ``most``.
    """
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


def read_flag(parameters: Parameters, name: str) -> bool:
    """The parameter's value, False where it is not there.

    Raises:
        InvalidRequestError: it is not true or false.
    """
    if name not in parameters:
        return False
    if parameters[name].WhichOneof("parameter_choice") != "bool_param":
        raise InvalidRequestError(f"parameter {name!r} is not a bool_param")
    flag: bool = parameters[name].bool_param
    return flag


def refuse_sequence(parameters: Parameters) -> None:
    """Refuse a request that is one of a sequence.

    Raises:
        InvalidRequestError: its ``sequence_id`` is neither 0 nor empty.
    """
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


def _number(parameter: ipb.InferParameter) -> int | None:
    """The parameter's value where it is a whole number."""
    kind = parameter.WhichOneof("parameter_choice")
    if kind == "int64_param":
        return parameter.int64_param
    if kind == "uint64_param":
        return parameter.uint64_param
    return None
