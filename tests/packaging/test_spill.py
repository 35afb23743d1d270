"""Tables in files instead of memory: the same package, and nothing left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from tessera.errors import UserError
from tessera.serving.package.loading import load_package
from tessera.serving.packaging.options import Origin, PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.serving.packaging.ranking import ranking_source
from tessera.serving.packaging.servable import make_servable
from tessera.serving.packaging.tables import spill
from tessera.serving.packaging.tables.spill import MappedPages, Spill, SpilledRoom
from tessera.serving.packaging.write.stream import Draft
from tessera.training.distributed.checkpoint.reader import Piece, SavedTensors
from tests.package_factory import make_model


@pytest.fixture
def all_spilled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "SPILLED_FROM_BYTES", 1)


def resident_bytes() -> int:
    """Pages of files that this process has mapped in and looked at."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile"))


def saved(path: Path, scripted: torch.jit.ScriptModule, buffers: list[torch.Tensor]) -> object:
    path.mkdir()
    with Draft(path / "model.draft", scripted, buffers, {"x": b"extra"}).open() as records:
        return {name: (size, b"".join(content)) for name, (size, content) in records.items()}


@pytest.mark.parametrize("dtype", ["int8", "fp32"])
@pytest.mark.usefixtures("all_spilled")
def test_the_records_are_those_that_torch_writes(dtype: str, tmp_path: Path) -> None:
    made = Spill(tmp_path)
    options = PackageOptions(name="m", dtype=dtype)
    scripted = make_servable(ranking_source(make_model()), options, allocate=made.zeros).scripted
    assert len(made.buffers) == 1
    expected = saved(tmp_path / "a", scripted, [])
    assert saved(tmp_path / "b", scripted, made.buffers) == expected
    # The module has its tables back.
    assert saved(tmp_path / "c", scripted, []) == expected


@pytest.mark.usefixtures("all_spilled")
def test_a_spilled_package_answers_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    write_model(make_model(), path, PackageOptions(name="m"), origin=Origin(created="2026-01-02"))
    assert load_package(path).manifest.created == "2026-01-02"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("all_spilled")
def test_a_spilled_buffer_is_zero_and_its_file_has_no_name(tmp_path: Path) -> None:
    made = Spill(tmp_path)
    buffer = made.zeros(100_000)
    assert buffer.dtype == torch.uint8
    assert buffer.shape == (100_000,)
    assert not buffer.any()
    assert [id(each) for each in made.buffers] == [id(buffer)]
    assert list(tmp_path.iterdir()) == []


def test_a_small_buffer_stays_in_memory(tmp_path: Path) -> None:
    made = Spill(tmp_path)
    assert not made.zeros(spill.SPILLED_FROM_BYTES - 1).any()
    assert made.buffers == []


@pytest.mark.usefixtures("all_spilled")
def test_a_disk_without_room_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"has no room for 10 bytes .* --out on a larger disk"):
        Spill(tmp_path).zeros(10)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("all_spilled")
def test_released_pages_leave_memory_and_keep_their_values(tmp_path: Path) -> None:
    size = 64 << 20
    buffer = Spill(tmp_path).zeros(size)
    buffer.copy_(torch.arange(size, dtype=torch.int64).to(torch.uint8))
    before = resident_bytes()
    MappedPages(buffer).release(buffer)
    # The kernel may keep a page that it is writing just then.
    assert resident_bytes() < before - size // 2
    assert torch.equal(buffer, torch.arange(size, dtype=torch.int64).to(torch.uint8))


def test_a_privately_changed_page_of_a_mapped_checkpoint_is_not_lost(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1 << 20)}, tmp_path / "w.pt")
    weights = torch.load(tmp_path / "w.pt", mmap=True, weights_only=True)["w"]
    weights[12345] = 7
    MappedPages(weights).release(weights)
    assert weights[12345] == 7
    assert weights.sum() == (1 << 20) + 6


def test_whose_the_pages_of_a_small_tensor_are_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(spill, "_lies_in_its_file", asked.append)
    torch.save({"w": torch.ones(spill.RELEASED_FROM_BYTES // 4)}, tmp_path / "w.pt")
    weights = torch.load(tmp_path / "w.pt", mmap=True, weights_only=True)["w"]
    MappedPages(weights[1:]).release(weights[1:])
    assert asked == []
    MappedPages(weights)
    assert asked == [weights.data_ptr()]


def test_memory_that_is_no_files_is_left_alone() -> None:
    values = torch.arange(1 << 20)
    pages = MappedPages(values)
    pages.release(values)
    assert torch.equal(values, torch.arange(1 << 20))


@pytest.mark.usefixtures("all_spilled")
def test_a_checkpoint_of_several_files_is_read_into_files(tmp_path: Path) -> None:
    state = {"table": torch.rand(5000, 16), "bias": torch.rand(3), "step": torch.tensor(7)}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    room = SpilledRoom(tmp_path)
    saved = SavedTensors(tmp_path / "saved", room)
    read = {name: saved.empty(name) for name in saved.names}
    saved.read(Piece(name, (0,) * tensor.dim(), tensor) for name, tensor in read.items())
    assert read.keys() == state.keys()
    for name, tensor in state.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    assert len(room._spill.buffers) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
