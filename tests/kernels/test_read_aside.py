"""Reading a file's bytes beside serving is what reading them is."""

import os
from pathlib import Path

import pytest
import torch

from tessera.kernels.ops import is_built_for

pytestmark = pytest.mark.skipif(
    not is_built_for("read_aside", "cpu"), reason="the operators are not built"
)


def read_aside(out: torch.Tensor, path: Path, offset: int, share: float = 1.0) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        torch.ops.tessera.read_aside(out, descriptor, offset, share)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("count", [0, 1, 65_536, 65_537, 1_000_003])
@pytest.mark.parametrize("offset", [0, 4097])
def test_the_bytes_are_those_of_the_file_and_no_others_change(
    tmp_path: Path, count: int, offset: int
) -> None:
    content = torch.randint(256, (1_100_000,), generator=torch.Generator().manual_seed(count))
    path = tmp_path / "file"
    path.write_bytes(bytes(content.tolist()))
    whole = torch.full((count + 2,), 7, dtype=torch.uint8)
    read_aside(whole[1:-1], path, offset)
    assert torch.equal(whole[1:-1], content[offset : offset + count].to(torch.uint8))
    assert whole[0] == whole[-1] == 7


def test_a_file_that_ends_before_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    with pytest.raises(RuntimeError, match="the file ends 28 bytes too early"):
        read_aside(torch.empty(128, dtype=torch.uint8), path, 0)


def test_a_file_that_cannot_be_read_is_told() -> None:
    with pytest.raises(RuntimeError, match="cannot be read: Bad file descriptor"):
        torch.ops.tessera.read_aside(torch.empty(1, dtype=torch.uint8), -1, 0, 1.0)


@pytest.mark.parametrize(
    ("out", "offset", "share", "why"),
    [
        (torch.empty(4), 0, 0.5, "a contiguous uint8 vector is needed"),
        (torch.empty(4, dtype=torch.uint8)[::2], 0, 0.5, "a contiguous uint8 vector is needed"),
        (torch.empty(4, dtype=torch.uint8), -1, 0.5, "offset: -1"),
        (torch.empty(4, dtype=torch.uint8), 0, 0.0, "share: 0"),
        (torch.empty(4, dtype=torch.uint8), 0, 1.5, "share: 1.5"),
    ],
)
def test_arguments_are_checked(
    tmp_path: Path, out: torch.Tensor, offset: int, share: float, why: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10))
    with pytest.raises(RuntimeError, match=why):
        read_aside(out, path, offset, share)
