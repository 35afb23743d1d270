"""Regions of shared memory: what may be registered, and what is read of it whatever its client does."""

import gc
import itertools
import os

import pytest

from tessera.errors import FieldError
from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.server.config import ModelSource, ServerConfig
from tessera.serving.server.errors import Code, ServeError
from tessera.serving.server.request.infer_regions import RequestRegions
from tessera.serving.server.request.shared_memory import (
    RegionFacts,
    SharedLimits,
    SharedMemory,
    shared_memory_of,
)
from tests.shared_object import SharedObject

CONTENT = b"0123456789"
EDGES = [0, 1, 2, 4, 5, 6, 7, 9, 10, 11, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 11, 2**64 - 1]


@pytest.fixture(scope="module")
def shared():
    with SharedObject(CONTENT) as made:
        yield made


def new_memory():
    return SharedMemory(SharedLimits(descriptors=3, bytes=1 << 70, request_bytes=1_000))


def refusal(call, *arguments):
    with pytest.raises(ServeError) as caught:
        call(*arguments)
    return caught.value


def test_a_region_is_registered_where_it_lies_in_its_object(shared):
    memory = new_memory()
    for offset, size in itertools.product(EDGES, EDGES):
        facts = RegionFacts("region", shared.key, offset, size)
        if size > 0 and offset + size <= len(CONTENT):
            memory.add(facts)
            assert memory.find("region").read(0, size) == CONTENT[offset : offset + size]
            memory.remove("region")
        else:
            assert refusal(memory.add, facts).code is Code.INVALID_ARGUMENT
        assert (memory.held_bytes, memory.held_descriptors) == (0, 0)


def placed(offset, size, *, signed=True):
    tensor = ipb.ModelInferRequest.InferInputTensor(name="x")
    tensor.parameters["shared_memory_region"].string_param = "region"
    for key, number in (("offset", offset), ("byte_size", size)):
        parameter = tensor.parameters[f"shared_memory_{key}"]
        if signed and number < 2**63:
            parameter.int64_param = number
        else:
            parameter.uint64_param = number
    return tensor


@pytest.mark.parametrize("signed", [True, False])
def test_a_tensor_lies_in_its_region(shared, signed):
    memory = new_memory()
    memory.add(RegionFacts("region", shared.key, 2, 6))
    for offset, size in itertools.product(EDGES, EDGES):
        tensor = placed(offset, size, signed=signed)
        regions = RequestRegions(memory)
        if offset + size <= 6:
            assert regions.size_of(tensor) == size
            assert regions.content_of(tensor) == CONTENT[2 + offset : 2 + offset + size]
            assert regions.copied_bytes == size
        else:
            assert refusal(regions.content_of, tensor).code is Code.INVALID_ARGUMENT


def test_a_request_has_what_it_has_read():
    memory = new_memory()
    tensor = placed(0, 10)
    with SharedObject(CONTENT) as shared:
        memory.add(RegionFacts("region", shared.key, 0, 10))
        regions = RequestRegions(memory)
        assert regions.content_of(tensor) == CONTENT
        os.truncate(shared.path, 4)
        assert "has shrunk" in refusal(RequestRegions(memory).content_of, tensor).message
    memory.remove("region")
    # As for a shadow, which computes the request once more.
    assert regions.content_of(tensor) == CONTENT
    assert regions.copied_bytes == 10


def test_regions_and_descriptors_are_bounded_and_given_back(shared):
    memory = SharedMemory(SharedLimits(descriptors=3, bytes=20, request_bytes=1_000))
    for name in ("a", "b"):
        memory.add(RegionFacts(name, shared.key, 0, 9))
    assert refusal(memory.add, RegionFacts("c", shared.key, 0, 3)).code is Code.RESOURCE_EXHAUSTED
    memory.add(RegionFacts("c", shared.key, 0, 2))
    memory.remove("a")
    memory.add(RegionFacts("a", shared.key, 0, 1))
    assert refusal(memory.find("a").open_for_writing).code is Code.RESOURCE_EXHAUSTED
    used = memory.find("b")
    memory.remove("")
    gc.collect()  # what was refused keeps its frames
    # One that is in use stays with its user.
    assert used.read(0, 9) == CONTENT[:9]
    assert (memory.held_bytes, memory.held_descriptors) == (9, 1)
    del used
    assert (memory.held_bytes, memory.held_descriptors) == (0, 0)


def test_it_is_off_by_default_and_of_one_process():
    model = ModelSource(path="model.pt")
    assert shared_memory_of(ServerConfig(models=(model,))) is None
    with pytest.raises(FieldError, match="leave --processes out, or --shared-memory"):
        ServerConfig(models=(model,), shared_memory=True, processes=2)
