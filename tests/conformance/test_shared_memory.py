"""KServe's extension for system shared memory, docs/kserve.md: both servers, with clients that do as they please."""

import json
import os
import threading

import grpc
import numpy as np
import pytest

from tessera.serving.protocol import inference_pb2 as ipb
from tests.conformance.conformance_harness import TIMEOUT_S, same_bits, scores_of
from tests.conformance.rest_calls import RestClient
from tests.kserve_messages import infer, infer_request, stub_of
from tests.shared_object import FOLDER, SharedObject

SERVER_FLAGS = ("--shared-memory", "--max-shared-memory-bytes", "1000000")
pytestmark = pytest.mark.usefixtures("shares_memory")
ROOT = "/v2/systemsharedmemory"
DENSE = "input 'float_features'"
REGION = "shared memory region 'region'"
SHRUNK = f"{REGION} has shrunk:"
HELD = "the shared memory regions that are registered have"
BEYOND = "reach beyond the shared memory"
NO_NAME = (
    "key '{}' is not a name of POSIX shared memory, expected one such as /name, of at most 255 bytes and without a "
    "further '/'"
)


@pytest.fixture
def client(server):
    """Calls about regions; none is left."""
    made = Regions(server)
    yield made
    made.unregister("")


class Regions:
    """Calls about regions; gives the status's name and details, empty for OK."""

    def __init__(self, server):
        self.stub = stub_of(server)

    def _outcome(self, method, request):
        try:
            getattr(self.stub, f"SystemSharedMemory{method}")(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code().name, error.details()
        return "OK", ""

    def register(self, name, key, byte_size, offset=0):
        request = ipb.SystemSharedMemoryRegisterRequest(
            name=name, key=key, offset=offset, byte_size=byte_size
        )
        return self._outcome("Register", request)

    def unregister(self, name):
        return self._outcome("Unregister", ipb.SystemSharedMemoryUnregisterRequest(name=name))

    def status(self, name):
        return self._outcome("Status", ipb.SystemSharedMemoryStatusRequest(name=name))

    def regions(self):
        told = self.stub.SystemSharedMemoryStatus(
            ipb.SystemSharedMemoryStatusRequest(), timeout=TIMEOUT_S
        )
        return {
            name: (one.name, one.key, one.offset, one.byte_size)
            for name, one in told.regions.items()
        }


def placed(parameters, offset, size, region="region"):
    parameters["shared_memory_region"].string_param = region
    if offset:
        parameters["shared_memory_offset"].int64_param = offset
    parameters["shared_memory_byte_size"].int64_param = size


def place_inputs(request, keep=()):
    """``request`` with its inputs in a region, from its third byte on, and the region's content."""
    made = ipb.ModelInferRequest()
    made.CopyFrom(request)
    del made.raw_input_contents[:]
    content = b"\xee" * 3  # no number begins at a multiple of its size
    for tensor, raw in zip(made.inputs, request.raw_input_contents, strict=True):
        if tensor.name in keep:
            made.raw_input_contents.append(raw)
            continue
        placed(tensor.parameters, len(content), len(raw))
        content += raw
    return made, content


def place_output(request, offset, size):
    placed(request.outputs.add(name="default").parameters, offset, size)


def refusal(server, request):
    with pytest.raises(grpc.RpcError) as caught:
        infer(server, request)
    return caught.value.code().name, caught.value.details()


def status_of(server, request):
    try:
        infer(server, request)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


@pytest.mark.parametrize("keep", [(), ("float_features",), ("id_list_features_values",)])
def test_scores_have_the_same_bits_and_may_lie_over_the_inputs(server, client, drawn, keep):
    message = drawn.samples(9)
    wanted = scores_of(server.predict(message))
    request, content = place_inputs(infer_request(message), keep)
    with SharedObject(content) as shared:
        assert client.register("region", shared.key, len(content)) == ("OK", "")
    # The object has no name any more; whoever has it open has it still.
    (answered,) = infer(server, request).raw_output_contents
    assert same_bits(np.frombuffer(answered, "<f4"), wanted)
    assert client.unregister("region") == ("OK", "")
    place_output(request, 1, len(content) - 1)
    with SharedObject(content) as shared:
        assert client.register("region", shared.key, len(content)) == ("OK", "")
        response = infer(server, request)
        assert shared.content[:1] == content[:1]
        assert same_bits(np.frombuffer(shared.content[1:37], "<f4"), wanted)
        assert shared.content[37:] == content[37:]
    # An entry for each output stays, so that others are found by their place.
    assert (list(response.raw_output_contents), response.outputs[0].shape) == ([b""], [9])


def test_the_same_over_rest(server, client, drawn):
    message = drawn.samples(4)
    wanted = scores_of(server.predict(message))
    request, content = place_inputs(infer_request(message))

    def parameters(one):
        return {
            key: one.parameters[key].string_param or one.parameters[key].int64_param
            for key in one.parameters
        }

    inputs = [
        {
            "name": one.name,
            "datatype": one.datatype,
            "shape": list(one.shape),
            "parameters": parameters(one),
        }
        for one in request.inputs
    ]
    output = {
        "name": "default",
        "parameters": {
            "shared_memory_region": "a/b ö",
            "shared_memory_byte_size": 16,
            "shared_memory_offset": 1,
        },
    }
    with SharedObject(content) as shared, RestClient(server.http_address) as rest:
        facts = {"key": shared.key, "byte_size": len(content)}
        for name in ("region", "a%2Fb%20%C3%B6"):
            path = f"{ROOT}/region/{name}/register"
            assert rest.infer(facts, path=path).json == {}
        told = {"key": shared.key, "offset": 0, "byte_size": len(content)}
        assert rest.get(f"{ROOT}/status").json == [
            {"name": name, **told} for name in ("a/b ö", "region")
        ]
        assert rest.get(f"{ROOT}/region/region/status").json == [{"name": "region", **told}]
        scores = rest.infer({"inputs": inputs}).json["outputs"][0]["data"]
        assert same_bits(scores, wanted)
        reply = rest.infer({"inputs": inputs, "outputs": [output]})
        assert reply.json["outputs"] == [{"name": "default", "datatype": "FP32", "shape": [4]}]
        assert same_bits(np.frombuffer(shared.content[1:17], "<f4"), wanted)
        inputs[0]["data"] = [1]
        assert rest.infer({"inputs": inputs}).json == {
            "error": "input 'float_features' has data and shared memory, expected only one of the two"
        }
        assert rest.infer(b"", path=f"{ROOT}/region/region/unregister").json == {}
        assert list(client.regions()) == ["a/b ö"]
        assert rest.infer(b"", path=f"{ROOT}/unregister").json == {}
    assert client.regions() == {}


REST_REFUSALS = {
    "no object": ("POST", "/region/a/register", b"[]", 400, "the JSON is not an object"),
    "no key": ("POST", "/region/a/register", b"{}", 400, "key is not a string"),
    "negative": (
        *("POST", "/region/a/register", b'{"key": "/a", "offset": -1}', 400),
        "offset is not a whole number from 0 on",
    ),
    "more than 64 bits": (
        *("POST", "/region/a/register", b'{"key": "/a", "byte_size": 18446744073709551616}', 400),
        "byte_size is not a whole number from 0 on",
    ),
    "absent": (
        *("POST", "/region/a/register", b'{"key": "/tessera-absent", "byte_size": 1}', 404),
        "there is no shared memory '/tessera-absent'",
    ),
    "unknown": (
        *("GET", "/region/nobody/status", None, 404),
        "shared memory region 'nobody' is not registered",
    ),
    "GET": ("GET", "/region/a/register", None, 405, "{} is asked with POST"),
    "POST": ("POST", "/status", b"", 405, "{} is asked with GET"),
    "all": ("POST", "/register", b"{}", 404, "there is no {}; docs/rest.md has the paths"),
    "no name": ("GET", "/region//status", None, 404, "there is no {}; docs/rest.md has the paths"),
    "more": ("GET", "/region/a/b/status", None, 404, "there is no {}; docs/rest.md has the paths"),
    "no UTF-8": (
        *("GET", "/region/%FF/status", None, 404),
        "there is no {}; docs/rest.md has the paths",
    ),
}


def test_what_rest_refuses(server):
    with RestClient(server.http_address) as rest:
        for method, path, body, status, text in REST_REFUSALS.values():
            reply = rest.call(method, ROOT + path, body)
            assert (reply.status, reply.json) == (status, {"error": text.format(ROOT + path)})


def test_regions_belong_to_no_connection(server, client):
    with SharedObject(b"0123456789") as shared, grpc.insecure_channel(server.address) as channel:
        assert client.register("region", shared.key[1:], 4, offset=6) == ("OK", "")
        other = Regions(server)
        other.stub = type(client.stub)(channel)
        assert other.regions() == {"region": ("region", shared.key[1:], 6, 4)}
        assert other.status("region") == ("OK", "")
        assert other.register("region", shared.key, 1) == (
            "ALREADY_EXISTS",
            "shared memory region 'region' is registered; unregister it first",
        )
        assert other.unregister("region") == ("OK", "")
    assert client.status("region") == (
        "NOT_FOUND",
        "shared memory region 'region' is not registered",
    )
    assert client.unregister("region") == ("OK", "")


MOST = 2**64 - 1


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 11), (10, 1), (11, 1), (MOST, 1), (1, MOST), (MOST - 4, 10), (2**63, 2**63)],
)
def test_a_region_lies_in_its_object(client, offset, size):
    with SharedObject(b"0123456789") as shared:
        code, text = client.register("region", shared.key, size, offset)
        if size > 1_000_000:
            assert (code, text) == (
                "RESOURCE_EXHAUSTED",
                f"{HELD} 0 bytes (limit 1000000), this one has {size}",
            )
        else:
            assert (code, text) == (
                "INVALID_ARGUMENT",
                f"offset {offset} and byte_size {size} {BEYOND} '{shared.key}', which has 10 bytes",
            )
    assert client.regions() == {}


def test_names_lead_nowhere_else(client):
    keys = (
        "",
        "/",
        "..",
        "//a",
        "/a/b",
        "../../etc/passwd",
        "/etc/passwd",
        "/dev/shm/a",
        "a" * 256,
    )
    for key in keys:
        assert client.register("region", key, 1) == ("INVALID_ARGUMENT", NO_NAME.format(key))
    with SharedObject(b"1") as shared:
        assert client.register("", shared.key, 1)[0] == "INVALID_ARGUMENT"
        assert client.register("region", shared.key, 0) == (
            "INVALID_ARGUMENT",
            "byte_size is 0, expected at least 1",
        )
        # A link leads elsewhere, and the open of a FIFO would wait for its other end.
        link, fifo = FOLDER / f"{shared.key[1:]}-link", FOLDER / f"{shared.key[1:]}-fifo"
        try:
            link.symlink_to(shared.path)
            os.mkfifo(fifo)
            for strange in (link, fifo):
                assert client.register("region", strange.name, 1) == (
                    "INVALID_ARGUMENT",
                    f"'{strange.name}' is not POSIX shared memory",
                )
        finally:
            link.unlink(missing_ok=True)
            fifo.unlink(missing_ok=True)
    assert client.register("region", shared.key, 1) == (
        "NOT_FOUND",
        f"there is no shared memory '{shared.key}'",
    )


def test_what_is_not_there_is_named(server, client, drawn):
    message = drawn.samples(2)
    request, content = place_inputs(infer_request(message))
    assert refusal(server, request) == (
        "NOT_FOUND",
        "input 'float_features': shared memory region 'region' is not registered",
    )
    with SharedObject(content) as shared:
        client.register("region", shared.key, len(content))
        wide, small, both = (ipb.ModelInferRequest() for _ in range(3))
        for one in (wide, small, both):
            one.CopyFrom(request)
        placed(wide.inputs[0].parameters, 2**63 - 1, 32)
        assert refusal(server, wide) == (
            "INVALID_ARGUMENT",
            f"{DENSE}: offset {2**63 - 1} and byte size 32 reach beyond {REGION}, which has {len(content)} bytes",
        )
        place_output(small, 0, 7)
        assert refusal(server, small) == (
            "INVALID_ARGUMENT",
            "output 'default' has 8 bytes, its part of shared memory region 'region' has 7",
        )
        both.raw_input_contents.append(b"")
        assert refusal(server, both) == (
            "INVALID_ARGUMENT",
            "raw_input_contents has 1 entries, expected 0: one for each input that is not in shared memory",
        )
        assert infer(server, request).raw_output_contents[0]
        os.truncate(shared.path, 10)
        before = server.value("tessera_rejected_total", model="ranker", reason="invalid")
        assert refusal(server, request) == (
            "INVALID_ARGUMENT",
            f"{DENSE}: {SHRUNK} its 32 bytes from 3 on are not all there",
        )
        after = server.value("tessera_rejected_total", model="ranker", reason="invalid")
        assert after == before + 1
        plain = infer_request(message)
        place_output(plain, 4, 8)
        assert refusal(server, plain) == (
            "INVALID_ARGUMENT",
            f"output 'default': {SHRUNK} its 8 bytes from 4 on are not all there",
        )
        assert len(shared.content) == 10
    assert server.predict(message)


def test_a_region_that_changes_all_the_time_harms_nobody(server, client, drawn):
    """A client that shrinks and fills what is being read; a page that is not there any more would end the server."""
    message = drawn.samples(50)
    request, content = place_inputs(infer_request(message))
    place_output(request, 0, 200)
    wanted = scores_of(server.predict(message))
    done, statuses = threading.Event(), set()

    def change(path):
        while not done.is_set():
            os.truncate(path, 0)
            path.write_bytes(content)

    with SharedObject(content) as shared:
        client.register("region", shared.key, len(content))
        changer = threading.Thread(target=change, args=(shared.path,))
        changer.start()
        try:
            for _ in range(40):
                statuses.add(status_of(server, request))
        finally:
            done.set()
            changer.join()
        assert statuses <= {"OK", "INVALID_ARGUMENT"}
        shared.path.write_bytes(content)
        infer(server, request)
        assert same_bits(np.frombuffer(shared.content[:200], "<f4"), wanted)


def test_the_server_says_that_it_has_it(server):
    told = stub_of(server).ServerMetadata(ipb.ServerMetadataRequest(), timeout=TIMEOUT_S)
    assert "system_shared_memory" in told.extensions
    assert "system_shared_memory" in json.loads(server.http("/v2")[1])["extensions"]
