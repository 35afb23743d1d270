"""Regions of POSIX shared memory that clients of this machine have registered (Triton's extension "system shared memory").

A region belongs to its clients, who may change and shrink it at any time.  So none is mapped: a page behind the end of
a file that has shrunk would end the process by SIGBUS where it is read, while ``pread`` and ``pwrite`` tell how much
there was.  Inputs are copied once, and only the copy is checked and used.  docs/kserve.md has the calls,
docs/security.md what is to be feared of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
from dataclasses import dataclass

from tessera.serving.server.config import ServerConfig
from tessera.serving.server.errors import (
    Code,
    InvalidRequestError,
    QueueFullError,
    RejectReason,
    ServeError,
)

_FOLDER = "/dev/shm/"  # noqa: S108 - where shm_open opens its objects
_MOST_NAME_BYTES = 255  # as those of files
_MOST_DESCRIPTORS = 1_024
_OTHER_DESCRIPTORS = 64
# As shm_open: a link leads elsewhere.  And the open of a FIFO, or of a file that is leased, must not block.
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def descriptors_to_be_had(most: int = _MOST_DESCRIPTORS) -> int:
    """The descriptors that regions may have, at most ``most``.

    The process's limit of open files is raised for them as far as the system lets it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    raised = soft + most if hard == resource.RLIM_INFINITY else min(soft + most, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    except (OSError, ValueError):
        raised = soft
    return min(max((raised - _OTHER_DESCRIPTORS) // 2, 1), most)


@dataclass(frozen=True, slots=True)
class SharedLimits:
    """Bounds of all regions, and of one request.

    Attributes:
        descriptors: one for each region, and another for each that outputs go to.
        bytes: of all regions.
        request_bytes: that one request may have in regions.
    """

    descriptors: int
    bytes: int
    request_bytes: int


def shared_memory_of(config: ServerConfig) -> SharedMemory | None:
    """What the flags ask for; None: clients may not register anything."""
    if not config.shared_memory:
        return None
    return SharedMemory(
        SharedLimits(
            descriptors=descriptors_to_be_had(),
            bytes=config.max_shared_memory_bytes,
            request_bytes=config.max_message_bytes,
        )
    )


@dataclass(frozen=True, slots=True)
class RegionFacts:
    """What is said when a region is registered.

    Attributes:
        name: of the region.
        key: of the POSIX object: ``NAME`` or ``/NAME``.
        offset: of the region in the object, in bytes.
        byte_size: the region's.
    """

    name: str
    key: str
    offset: int
    byte_size: int


class SharedRegion:
    """A registered region; it lives as long as somebody uses it.

    Args:
        memory: counts what it takes.
        facts: what was said of it.
        descriptor: of the object, for reading; closed with the region.
    """

    def __init__(self, memory: SharedMemory, facts: RegionFacts, descriptor: int) -> None:
        self.facts = facts
        self._memory = memory
        self._descriptor = descriptor
        self._writable = -1

    def __del__(self) -> None:
        for descriptor in (self._descriptor, self._writable):
            if descriptor >= 0:
                os.close(descriptor)
                self._memory.held_descriptors -= 1
        self._memory.held_bytes -= self.facts.byte_size

    def read(self, offset: int, size: int) -> bytes:
        """A copy of ``size`` bytes, all of which lie in the region.

        Raises:
            InvalidRequestError: they are not there any more.
        """
        content = os.pread(self._descriptor, size, self.facts.offset + offset) if size else b""
        while 0 < len(content) < size:
            at = self.facts.offset + offset + len(content)
            more = os.pread(self._descriptor, size - len(content), at)
            if not more:
                break
            content += more
        if len(content) < size:
            raise self._shrunk(offset, size)
        return content

    def open_for_writing(self) -> None:
        """To be called before `write`.

        Raises:
            ServeError: the server may not write to it, or has no descriptor.
        """
        if self._writable >= 0:
            return
        if self._memory.held_descriptors >= self._memory.limits.descriptors:
            raise _not_opened(self.facts.key, errno.EMFILE)
        try:
            # The same object, though its name may stand for another one by now.
            self._writable = os.open(
                f"/proc/self/fd/{self._descriptor}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                raise _not_opened(self.facts.key, error.errno) from None
            raise InvalidRequestError(
                f"the server may not write to shared memory region '{self.facts.name}'"
            ) from None
        self._memory.held_descriptors += 1

    def write(self, offset: int, content: bytes) -> None:
        """Write ``content``, all of which lies in the region.

        Raises:
            ServeError: the region is not there any more, or the system has no memory for it.
        """
        at = self.facts.offset + offset
        # pwrite would make it as large again.
        if os.fstat(self._writable).st_size < at + len(content):
            raise self._shrunk(offset, len(content))
        try:
            while content:
                count = os.pwrite(self._writable, content, at)
                content, at = content[count:], at + count
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.ENOMEM}:
                raise QueueFullError(
                    f"the system has no memory for shared memory region '{self.facts.name}'"
                ) from None
            raise InvalidRequestError(
                f"shared memory region '{self.facts.name}' cannot be written to"
            ) from None

    def _shrunk(self, offset: int, size: int) -> InvalidRequestError:
        return InvalidRequestError(
            f"shared memory region '{self.facts.name}' has shrunk: its {size} bytes from {offset} on are not all "
            "there"
        )


class SharedMemory:
    """The regions by their names.  Owned by the event loop's thread.

    Args:
        limits: see `SharedLimits`.

    Attributes:
        limits: see `SharedLimits`.
        held_bytes: of regions that are registered or in use.
        held_descriptors: of these.
    """

    def __init__(self, limits: SharedLimits) -> None:
        self.limits = limits
        self.held_bytes = 0
        self.held_descriptors = 0
        self._regions: dict[str, SharedRegion] = {}

    def add(self, facts: RegionFacts) -> None:
        """Register a region.

        Raises:
            ServeError: its name is taken, there is no such object, or a limit is reached.
        """
        _check_facts(facts)
        self._check_room(facts)
        try:
            descriptor = os.open(_FOLDER + facts.key.removeprefix("/"), os.O_RDONLY | _FLAGS)
        except OSError as error:
            raise _not_opened(facts.key, error.errno or 0) from None
        try:
            _check_object(facts, os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        self.held_bytes += facts.byte_size
        self.held_descriptors += 1
        self._regions[facts.name] = SharedRegion(self, facts, descriptor)

    def remove(self, name: str) -> None:
        """Unregister a region, or with an empty name all; one that is not there is none to be removed, as in Triton."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def list(self, name: str) -> list[RegionFacts]:
        """The region ``name``, or with an empty name every one, by its name's order.

        Raises:
            ServeError: NOT_FOUND.
        """
        if not name:
            return [self._regions[each].facts for each in sorted(self._regions)]
        return [self.find(name).facts]

    def find(self, name: str) -> SharedRegion:
        """The region ``name``.

        Raises:
            ServeError: NOT_FOUND.
        """
        with contextlib.suppress(KeyError):
            return self._regions[name]
        raise ServeError(
            Code.NOT_FOUND,
            f"shared memory region '{name}' is not registered",
            RejectReason.INVALID,
        )

    def _check_room(self, facts: RegionFacts) -> None:
        if facts.name in self._regions:
            raise ServeError(
                Code.ALREADY_EXISTS,
                f"shared memory region '{facts.name}' is registered; unregister it first",
            )
        if self.held_bytes + facts.byte_size > self.limits.bytes:
            raise QueueFullError(
                f"the shared memory regions that are registered have {self.held_bytes} bytes (limit "
                f"{self.limits.bytes}), this one has {facts.byte_size}"
            )
        if self.held_descriptors >= self.limits.descriptors:
            raise QueueFullError(
                f"the shared memory regions that are registered have {self.limits.descriptors} descriptors, the "
                "limit"
            )


def _check_facts(facts: RegionFacts) -> None:
    if not facts.name:
        raise InvalidRequestError("name is empty, expected a name for the region")
    size = len(facts.name.encode())
    if size > _MOST_NAME_BYTES:
        raise InvalidRequestError(f"name has {size} bytes, the limit is {_MOST_NAME_BYTES}")
    key = facts.key.removeprefix("/")
    good = key and key not in {".", ".."} and len(key.encode()) <= _MOST_NAME_BYTES
    if not good or "/" in key or "\0" in key:
        raise InvalidRequestError(
            f"key '{facts.key}' is not a name of POSIX shared memory, expected one such as /name, of at most "
            f"{_MOST_NAME_BYTES} bytes and without a further '/'"
        )
    if facts.byte_size == 0:
        raise InvalidRequestError("byte_size is 0, expected at least 1")


def _check_object(facts: RegionFacts, about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise _not_opened(facts.key, errno.EINVAL)
    if facts.offset + facts.byte_size > about.st_size:
        raise InvalidRequestError(
            f"offset {facts.offset} and byte_size {facts.byte_size} reach beyond the shared memory "
            f"'{facts.key}', which has {about.st_size} bytes"
        )


def _not_opened(key: str, error: int) -> ServeError:
    if error == errno.ENOENT:
        return ServeError(Code.NOT_FOUND, f"there is no shared memory '{key}'")
    if error in {errno.EACCES, errno.EPERM}:
        return ServeError(
            Code.FAILED_PRECONDITION, f"the server may not read the shared memory '{key}'"
        )
    if error in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
        return QueueFullError(
            f"the server has no descriptor for the shared memory '{key}'; try again later"
        )
    return InvalidRequestError(f"'{key}' is not POSIX shared memory")
