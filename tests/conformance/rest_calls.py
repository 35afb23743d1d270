"""Speaks REST as a plain client does, and gives status, headers and body."""

import http.client
import json
from dataclasses import dataclass

import numpy as np

from tessera.serving.server.request.strings import split_raw
from tests.conformance.conformance_harness import TIMEOUT_S
from tests.kserve_messages import DTYPES


@dataclass(frozen=True)
class Reply:
    """An answer: HTTP's status, its headers by lower-case name, and the body's bytes."""

    status: int
    headers: dict
    content: bytes

    @property
    def json(self):
        """The body's JSON, without what follows it."""
        size = self.headers.get("inference-header-content-length")
        return json.loads(self.content if size is None else self.content[: int(size)])


class RestClient:
    """One connection, kept from call to call as long as the server keeps it."""

    def __init__(self, address):
        host, _, port = address.rpartition(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.close()

    def call(self, method, path, body=None, headers=None):
        self.connection.request(method, path, body=body, headers=headers or {})
        reply = self.connection.getresponse()
        headers = {name.lower(): value for name, value in reply.getheaders()}
        return Reply(reply.status, headers, reply.read())

    def get(self, path):
        return self.call("GET", path)

    def infer(self, body, headers=None, path="/v2/models/ranker/infer"):
        """``body``: bytes, or what becomes JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.call("POST", path, content, headers)


def rest_request(request, *, binary=(), rows=False, **more):
    """``request``, a ModelInferRequest with raw contents, as a body and the headers that go with it.

    ``binary``: names of inputs that travel as binary data, or True for all; ``rows``: a matrix is a list for each row.
    """
    inputs, tail = [], b""
    for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True):
        one = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if binary is True or tensor.name in binary:
            one["parameters"] = {"binary_data_size": len(content)}
            tail += content
        elif tensor.datatype == "BYTES":
            one["data"] = [text.decode() for text in split_raw(content, tensor.shape[0])]
        else:
            numbers = np.frombuffer(content, DTYPES[tensor.datatype])
            numbers = np.where(np.isnan(numbers), None, numbers.astype(object))
            one["data"] = (numbers.reshape(tensor.shape) if rows else numbers).tolist()
        inputs.append(one)
    text = json.dumps({"inputs": inputs, **more}).encode()
    return text + tail, {"Inference-Header-Content-Length": str(len(text))} if tail else {}


def outputs_of(reply):
    """Every output's float32 numbers by name, whichever way they came."""
    assert reply.status == 200, reply
    at = int(reply.headers.get("inference-header-content-length", len(reply.content)))
    found = {}
    for output in reply.json["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            numbers = np.array(output["data"], np.float64).astype("<f4")
        else:
            numbers = np.frombuffer(reply.content[at : at + size], "<f4")
            at += size
        assert output["datatype"] == "FP32"
        found[output["name"]] = numbers.reshape(output["shape"])
    assert at == len(reply.content)
    return found
