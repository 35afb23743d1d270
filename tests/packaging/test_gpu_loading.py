"""How a package for GPUs is loaded: as far as a CPU can tell, by reading its tables as those for a GPU are read."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.serving.package import loading, opening
from tessera.serving.package.device_tables import DeviceTables
from tessera.serving.package.loading import LoadedPackage, Loading, load_package
from tessera.serving.package.records import PackageError, Records
from tessera.serving.package.runner import TorchScriptRunner
from tessera.serving.package.time_limit import TimeLimit
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.serving.server.config import ServerConfig
from tessera.serving.server.repository.version_loader import PackageVersionLoader
from tests.package_factory import make_model
from tests.packaging.backends import NEEDS_TESSERA
from tests.packaging.batches import random_batch

pytestmark = NEEDS_TESSERA
SHARDS = [1, 3]


@pytest.fixture(autouse=True)
def _all_tables_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "LARGE_BYTES", 2000)


@pytest.fixture
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of every package go to devices, of which the CPU is one."""
    monkeypatch.setattr(loading, "on_host", lambda _: False)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Packages for GPUs, by their number of shards."""
    folder = tmp_path_factory.mktemp("gpu")
    for shards in SHARDS:
        sharding = "auto" if shards == 1 else "row_wise"
        options = PackageOptions(
            name="m", backend="tessera", device="cuda", shards=shards, sharding=sharding
        )
        write_model(make_model(), folder / f"{shards}.pt", options)
    return {shards: folder / f"{shards}.pt" for shards in SHARDS}


def answers(package: LoadedPackage) -> dict[str, torch.Tensor]:
    batch = random_batch(package.manifest.schema, 33, max_length=9, seed=1)
    return dict(package.runner.forward(batch))


def large_tables(path: Path) -> list[str]:
    return opening.Opening(Records(path), on_host=False).large_tables()


def changed(path: Path, to: Path) -> tuple[Path, str]:
    """A copy in which the last byte of a large table is another one, and the table's record."""
    name = large_tables(path)[-1]
    entry = next(entry for entry in Records(path).entries if entry.name == name)
    content = bytearray(path.read_bytes())
    content[entry.end_offset - 1] ^= 1
    to.write_bytes(content)
    return to, name


@pytest.mark.parametrize("shards", SHARDS)
def test_it_answers_as_it_does_on_the_host(
    packages: dict[int, Path], shards: int, request: pytest.FixtureRequest
) -> None:
    devices = ["cpu"] * shards
    expected = load_package(packages[shards], devices=devices)
    request.getfixturevalue("as_on_gpus")
    found = load_package(packages[shards], devices=devices)
    for output, value in answers(expected).items():
        assert torch.equal(answers(found)[output], value)
    assert found.sha256 == expected.sha256


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.usefixtures("as_on_gpus")
def test_each_byte_of_a_table_is_read_once_and_only_after_the_module_is_open(
    packages: dict[int, Path], shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[int] = Counter()
    real = os.preadv

    def preadv(file: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = real(file, buffers, offset)
        read.update(range(offset, offset + count))
        return count

    made = Loading(packages[shards], devices=["cpu"] * shards)
    monkeypatch.setattr("os.preadv", preadv)
    tables = [entry for entry in made.records.entries if entry.name in large_tables(made.path)]
    assert len(tables) >= shards
    bytes_of_tables = {n for entry in tables for n in range(entry.content_offset, entry.end_offset)}
    told: list[int] = []
    made.read(told.append)
    made.open()
    assert not read.keys() & bytes_of_tables
    made.read_tables(told.append)
    assert {read[byte] for byte in bytes_of_tables} == {1}
    assert set(read.values()) == {1}
    made.build()
    made.settle(verify_golden=True)
    assert set(read.values()) == {1}
    assert sum(told) == sum(info.bytes for info in made.manifest.records.values())


@pytest.mark.usefixtures("as_on_gpus")
def test_build_takes_the_steps_that_were_not_taken(packages: dict[int, Path]) -> None:
    made = Loading(packages[3], devices=["cpu"] * 3)
    made.read()
    made.build()
    made.settle(verify_golden=True)


@pytest.mark.usefixtures("as_on_gpus")
def test_nothing_is_called_before_every_table_was_compared(
    packages: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*_: object) -> None:
        raise AssertionError("the model was called")

    path, name = changed(packages[3], tmp_path / "m.pt")
    monkeypatch.setattr(TorchScriptRunner, "forward", forward)
    monkeypatch.setattr(loading, "optimize", forward)
    with pytest.raises(PackageError) as found:
        load_package(path, devices=["cpu"] * 3)
    records = Records(path)
    with pytest.raises(PackageError, match=f"record '{name}' was changed: SHA-256") as expected:
        records.check(records.manifest().records)
    assert str(found.value) == str(expected.value)


@pytest.mark.usefixtures("as_on_gpus")
def test_reading_tables_takes_no_time_of_the_packages_own_code(
    packages: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[str] = []
    limits: list[object] = []

    def limited(limit: object, _: Path) -> Any:
        limits.append(limit)
        return _Block()

    class _Block:
        def __enter__(self) -> None:
            blocks.append("begin")

        def __exit__(self, *_: object) -> None:
            blocks.append("end")

    def told(name: str, real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            blocks.append(name)
            return real(*arguments, **options)

        return call

    monkeypatch.setattr(loading, "limited", limited)
    monkeypatch.setattr(DeviceTables, "read", told("tables", DeviceTables.read))
    monkeypatch.setattr("torch.jit.load", told("open", torch.jit.load))
    monkeypatch.setattr(Loading, "settle", told("settle", Loading.settle))
    limit = TimeLimit(seconds=300, prefix="", status=2)
    load_package(packages[1], devices=["cpu"], time_limit=limit)
    assert limits == [limit]
    assert blocks == ["begin", "open", "end", "tables", "begin", "settle", "end"]


@pytest.mark.parametrize("beside_others", [False, True])
@pytest.mark.usefixtures("as_on_gpus")
def test_a_server_is_told_how_much_is_read(
    packages: dict[int, Path], monkeypatch: pytest.MonkeyPatch, *, beside_others: bool
) -> None:
    loader = PackageVersionLoader(ServerConfig(model_repositories=("models",)), None)
    monkeypatch.setattr(loader._packages, "replica_devices", lambda _: [["cpu"] * 3])
    threads: set[str] = set()
    paces: list[object] = []
    real = DeviceTables._read_part

    def read_part(self: DeviceTables, *arguments: Any) -> None:
        threads.add(threading.current_thread().name)
        paces.append(self._archive.pace)
        real(self, *arguments)

    monkeypatch.setattr(DeviceTables, "_read_part", read_part)
    told: list[float] = []
    loaded = loader.load(packages[3], told.append, beside_others=beside_others)
    assert told == sorted(told)
    # The manifest is not read with the others.
    records = Records(packages[3])
    whole = sum(entry.bytes for entry in records.entries)
    assert told[-1] == pytest.approx(1 - len(records.manifest_bytes()) / whole)
    assert threads == {"aside"}
    assert [pace is not None for pace in paces] == [beside_others] * len(paces)
    assert loaded.device == "cuda"
    batch = random_batch(Records(packages[3]).manifest().schema, 5, max_length=3, seed=2)
    expected = load_package(packages[3], devices=["cpu"] * 3).runner.forward(batch)
    assert torch.equal(loaded.runner.forward(batch)["default"], expected["default"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_damaged_table_leaves_nothing_on_a_gpu(packages: dict[int, Path], tmp_path: Path) -> None:
    load_package(packages[3], devices=["cuda:0"] * 3)
    gc.collect()
    before = torch.cuda.memory_allocated(0)
    path, name = changed(packages[3], tmp_path / "m.pt")
    with pytest.raises(PackageError, match=f"record '{name}' was changed: SHA-256"):
        load_package(path, devices=["cuda:0"] * 3)
    assert torch.cuda.memory_allocated(0) <= before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("shards", SHARDS)
def test_shards_on_one_gpu_hold_the_bytes_of_the_file(
    packages: dict[int, Path], shards: int
) -> None:
    made = Loading(packages[shards], devices=["cuda:0"] * shards, patchable=True)
    made.read()
    made.build()
    made.settle(verify_golden=True)
    content = packages[shards].read_bytes()
    places = {entry.name: entry for entry in made.records.entries}
    memory = made.patchable_memory()
    assert set(large_tables(made.path)) <= memory.keys()
    for name in large_tables(made.path):
        begin, end = places[name].content_offset, places[name].end_offset
        for table in memory[name]:
            assert table.device == torch.device("cuda:0")
            assert table.cpu().numpy().tobytes() == content[begin:end]
