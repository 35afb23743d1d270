"""Scores over REST: a ModelInferResponse as JSON, with or without binary data behind it.

A score in JSON is the shortest decimal number that names, as a double, the same number as the model's float32: readers
that know doubles alone get the same bits.  What is not a finite number is ``null`` there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.server.front.rest_request import Encodings

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class RestAnswer:
    """A body.

    Attributes:
        content: JSON, and binary data behind it.
        json_bytes: how many bytes the JSON has where something follows it; None: nothing does.
    """

    content: bytes
    json_bytes: int | None


def write_answer(message: bytes, encodings: Encodings) -> RestAnswer:
    """The body of the answer that ``message``, a serialised ModelInferResponse, is."""
    response = ipb.ModelInferResponse.FromString(message)
    told: dict[str, Any] = {
        "model_name": response.model_name,
        "model_version": response.model_version,
    }
    if response.id:
        told["id"] = response.id
    if response.parameters:
        told["parameters"] = {
            key: response.parameters[key].int64_param for key in response.parameters
        }
    told["outputs"] = []
    binary: list[bytes] = []
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        one: dict[str, Any] = {
            "name": output.name,
            "datatype": output.datatype,
            "shape": list(output.shape),
        }
        if output.name in encodings.placed:
            pass  # its scores are where the request said
        elif encodings.is_binary(output.name):
            one["parameters"] = {"binary_data_size": len(raw)}
            binary.append(raw)
        else:
            one["data"] = _numbers(raw)
        told["outputs"].append(one)
    text = json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode()
    return RestAnswer(text + b"".join(binary), len(text) if binary else None)


def _numbers(raw: bytes) -> list[float | None]:
    scores = np.frombuffer(raw, "<f4").astype(np.float64)
    if np.isfinite(scores).all():
        numbers: list[float | None] = scores.tolist()
        return numbers
    return [score if np.isfinite(score) else None for score in scores.tolist()]
