"""``tessera::read_with_pauses``, which takes over tables beside serving, against one read."""

import os
import threading

import pytest
import torch

import tessera.kernels.ops  # noqa: F401 - registers the operators
from tessera.kernels import reference


@pytest.fixture
def descriptor(tmp_path):
    path = tmp_path / "content"
    path.write_bytes(os.urandom(10_000))
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize(
    ("size", "offset", "piece", "share"),
    [
        (10_000, 0, 4096, 1.0),
        (9_000, 1_000, 1, 1.0),
        (77, 13, 100, 0.2),
        (6_000, 5, 512, 0.3),
        (0, 3, 1, 0.5),
    ],
)
def test_it_reads_what_one_read_gives(descriptor, size, offset, piece, share):
    found = torch.zeros(size, dtype=torch.uint8)
    expected = torch.zeros(size, dtype=torch.uint8)
    torch.ops.tessera.read_with_pauses(found, descriptor, offset, piece, share)
    reference.read_with_pauses(expected, descriptor, offset, piece, share)
    assert torch.equal(found, expected)


def test_others_run_while_it_pauses(descriptor):
    """It pauses for the most that it may, 50 ms, after each of ten bytes."""
    room = torch.zeros(10, dtype=torch.uint8)
    begun, turns = threading.Event(), 0

    def read():
        begun.set()
        torch.ops.tessera.read_with_pauses(room, descriptor, 0, 1, 1e-9)

    thread = threading.Thread(target=read)
    thread.start()
    begun.wait()
    while thread.is_alive():
        turns += 1
        thread.join(0.01)
    assert turns > 1


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"offset": -1}, "offset: -1"),
        ({"piece": 0}, "piece: 0"),
        ({"share": 0.0}, "share: 0"),
        ({"share": 1.5}, "share: 1.5"),
        ({"offset": 9_990}, "ends at 10000, expected 90 bytes more"),
        ({"descriptor": 1 << 20}, "cannot be read: Bad file descriptor"),
        ({"into": torch.zeros(10)}, "into: a contiguous uint8 vector is needed"),
        ({"into": torch.zeros(4, 4, dtype=torch.uint8)}, "into: a contiguous uint8 vector"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(descriptor, change, part):
    into = torch.zeros(100, dtype=torch.uint8)
    given = {"into": into, "descriptor": descriptor, "offset": 0, "piece": 64, "share": 1.0}
    with pytest.raises(RuntimeError, match=part):
        torch.ops.tessera.read_with_pauses(*(given | change).values())
