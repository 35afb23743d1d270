"""Tensors of a ModelInferRequest that lie in shared memory: what their parameters say, and copies of the inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.server.errors import InvalidRequestError, ServeError
from tessera.serving.server.request.infer_parameters import Parameters, read_number
from tessera.serving.server.request.shared_memory import SharedMemory, SharedRegion

REGION, OFFSET, BYTE_SIZE = KEYS = (
    "shared_memory_region",
    "shared_memory_offset",
    "shared_memory_byte_size",
)
_MOST_SIGNED = (1 << 63) - 1


def is_placed(parameters: Parameters) -> bool:
    """Whether they say that their tensor lies in shared memory."""
    return any(key in parameters for key in KEYS)


def check_parameters(kind: str, name: str, parameters: Parameters, *, may_be_placed: bool) -> None:
    """Refuse what would have to be obeyed and is not, the first key in the alphabet's order.

    Raises:
        InvalidRequestError: it names the parameter and the tensor.
    """
    refused = min(
        (
            key
            for key in parameters
            if (key == "classification" or key.startswith("shared_memory_"))
            and not (may_be_placed and key in KEYS)
        ),
        default=None,
    )
    if refused is not None:
        raise InvalidRequestError(f"parameter '{refused}' of {kind} '{name}' is not supported")


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a region, all of which lies in it."""

    region: SharedRegion
    offset: int
    byte_size: int

    def write(self, output: str, content: bytes) -> None:
        """Write the scores of ``output``, which have room here.

        Raises:
            ServeError: the region is not there any more, or the system has no memory for it.
        """
        with of_tensor("output", output):
            self.region.write(self.offset, content)


class RequestRegions:
    """The tensors of one request in shared memory.

    A request may be decoded once more, for another version: it has then what was read the first time.

    Args:
        memory: where they are; None: they may be nowhere.

    Attributes:
        copied_bytes: what was read.
    """

    def __init__(self, memory: SharedMemory | None) -> None:
        self._memory = memory
        self._contents: dict[str, bytes] = {}
        self.copied_bytes = 0

    @property
    def allowed(self) -> bool:
        """Whether tensors may be in shared memory."""
        return self._memory is not None

    def size_of(self, tensor: ipb.ModelInferRequest.InferInputTensor) -> int:
        """The bytes that ``tensor`` says it has; all of them lie in its region, unless they were read before.

        Raises:
            ServeError: there is no such region, or they do not lie in it.
        """
        if tensor.name in self._contents:
            return len(self._contents[tensor.name])
        return self.locate("input", tensor.name, tensor.parameters).byte_size

    def content_of(self, tensor: ipb.ModelInferRequest.InferInputTensor) -> bytes:
        """A copy of ``tensor``, the same each time.

        Raises:
            ServeError: as `size_of`, or the request has too many bytes in shared memory.
        """
        assert self._memory is not None
        if tensor.name not in self._contents:
            place = self.locate("input", tensor.name, tensor.parameters)
            total = self.copied_bytes + place.byte_size
            if total > self._memory.limits.request_bytes:
                raise InvalidRequestError(
                    f"the request has {total} bytes in shared memory, the limit is "
                    f"{self._memory.limits.request_bytes}"
                )
            with of_tensor("input", tensor.name):
                content = place.region.read(place.offset, place.byte_size)
            self._contents[tensor.name] = content
            self.copied_bytes = total
        return self._contents[tensor.name]

    def place_of(self, output: str, parameters: Parameters, size: int) -> Place:
        """Where an output of ``size`` bytes goes.

        Raises:
            ServeError: there is no such region, or it has no room or must not be written to.
        """
        place = self.locate("output", output, parameters)
        if size > place.byte_size:
            raise InvalidRequestError(
                f"output '{output}' has {size} bytes, its part of shared memory region "
                f"'{place.region.facts.name}' has {place.byte_size}"
            )
        with of_tensor("output", output):
            place.region.open_for_writing()
        return place

    def locate(self, kind: str, name: str, parameters: Parameters) -> Place:
        """What the parameters of a tensor name.

        Raises:
            ServeError: there is no such region, or it does not lie in it.
        """
        assert self._memory is not None
        with of_tensor(kind, name):
            if REGION not in parameters or BYTE_SIZE not in parameters:
                raise InvalidRequestError(
                    f"parameters '{REGION}' and '{BYTE_SIZE}' are needed together"
                )
            if parameters[REGION].WhichOneof("parameter_choice") != "string_param":
                raise InvalidRequestError(f"parameter '{REGION}' is not a string")
            offset = read_number(parameters, OFFSET, _MOST_SIGNED)
            byte_size = read_number(parameters, BYTE_SIZE, _MOST_SIGNED)
            region = self._memory.find(parameters[REGION].string_param)
            if offset + byte_size > region.facts.byte_size:
                raise InvalidRequestError(
                    f"offset {offset} and byte size {byte_size} reach beyond shared memory region "
                    f"'{region.facts.name}', which has {region.facts.byte_size} bytes"
                )
        return Place(region, offset, byte_size)


@contextmanager
def of_tensor(kind: str, name: str) -> Iterator[None]:
    """Says of what is refused inside, which tensor it is about."""
    try:
        yield
    except ServeError as error:
        raise ServeError(error.code, f"{kind} '{name}': {error.message}", error.reason) from None
