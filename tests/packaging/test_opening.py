"""Loading: the bytes that were checked are the ones that serve, and tables are read once."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.kernels.libraries import load_libraries
from tessera.serving.package import opening
from tessera.serving.package.loading import load_package, open_checked
from tessera.serving.package.opening import Opening
from tessera.serving.package.records import PackageError, Records
from tessera.serving.package.storages import DATA_RECORD
from tessera.serving.package.torchscript import expected_deprecation
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tests.package_factory import make_model, make_package
from tests.packaging.archives import with_record
from tests.packaging.backends import EACH_BACKEND
from tests.packaging.batches import random_batch


@pytest.fixture(autouse=True)
def _all_tables_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "LARGE_BYTES", 2000)


def opened(path: Path, *, on_host: bool) -> tuple[Opening, Any]:
    records = Records(path)
    made = Opening(records, on_host=on_host)
    records.check(records.manifest().records, into=made.into)
    return made, made.module(["cpu"] * records.manifest().plan.num_shards)


def tensors(module: Any) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers(remove_duplicate=False)])


@pytest.mark.parametrize("backend", EACH_BACKEND)
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
def test_the_module_is_the_one_that_torch_loads(
    backend: str, *, on_host: bool, shards: int, tmp_path: Path
) -> None:
    if shards > 1 and backend != "tessera":
        pytest.skip("only Tessera's operators have shards")
    path = tmp_path / "m.pt"
    sharding = "auto" if shards == 1 else "row_wise"
    options = PackageOptions(name="m", backend=backend, shards=shards, sharding=sharding)
    write_model(make_model(), path, options)
    made, module = opened(path, on_host=on_host)
    with expected_deprecation():
        expected = torch.jit.load(str(path))
    # At least the tables did not take torch's way.
    assert made._tables
    assert tensors(module).keys() == tensors(expected).keys()
    for name, tensor in tensors(expected).items():
        assert torch.equal(tensors(module)[name], tensor), name
    batch = random_batch(Records(path).manifest().schema, 17, max_length=5, seed=0)
    assert torch.equal(module(*batch.tensors())["default"], expected(*batch.tensors())["default"])


def test_a_table_stays_where_it_was_read(package: Path) -> None:
    made, module = opened(package, on_host=True)
    places = {tensor.data_ptr() for tensor in tensors(module).values()}
    assert {table.data_ptr() for table in made._tables.values()} <= places


def test_what_happens_to_the_file_after_the_check_does_not_matter(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copy(package, tmp_path / "m.pt"))
    real: Callable[..., Any] = torch.jit.load

    def load(*arguments: object, **options: object) -> Any:
        path.write_bytes(b"something else")
        return real(*arguments, **options)

    monkeypatch.setattr("torch.jit.load", load)
    sha256 = open_checked(package).sha256()
    loaded = load_package(path)  # its golden answers hold
    assert path.read_bytes() == b"something else"
    assert loaded.sha256 == sha256


def change(path: Path, name: str) -> None:
    """Write other bytes into a record."""
    entry = next(entry for entry in Records(path).entries if entry.name == name)
    with path.open("r+b") as stream:
        stream.seek(entry.content_offset)
        stream.write(b"changed")


def opening_for_a_device(path: Path) -> Opening:
    """Everything but the large tables has been read."""
    records = Records(path)
    made = Opening(records, on_host=False)
    first = made.listed_first()
    assert first.keys() == records.manifest().records.keys() - made._tables.keys()
    records.check_some(first, into=made.into, progress=lambda _: None)
    return made


@pytest.mark.parametrize("checked_before", [False, True])
def test_a_table_that_is_read_for_a_device_is_hashed_then(
    package: Path, tmp_path: Path, *, checked_before: bool
) -> None:
    path = Path(shutil.copy(package, tmp_path / "m.pt"))
    made = opening_for_a_device(path)
    if checked_before:
        made._records.check(made._records.manifest().records)
    name = next(iter(made._tables))
    change(path, name)
    with pytest.raises(PackageError, match=rf"record '{name}' was changed: SHA-256 \w+ of \d+ byt"):
        made.module(["cpu"])


def test_a_table_that_the_module_has_no_place_for_is_compared_all_the_same(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copy(package, tmp_path / "m.pt"))
    monkeypatch.setattr(opening, "_stand_ins", lambda *_: iter(()))
    told: list[int] = []
    made = opening_for_a_device(path)
    sizes = {entry.name: entry.bytes for entry in Records(path).entries}
    expected = sum(sizes[name] for name in made._tables)
    made.open()
    made.read_tables(["cpu"], told.append)
    assert sum(told) == expected > 0
    made.read_tables(["cpu"], told.append)  # they are not read twice
    assert sum(told) == expected
    made = opening_for_a_device(path)
    name = next(iter(made._tables))
    change(path, name)
    made.open()
    with pytest.raises(PackageError, match=f"record '{name}' was changed: SHA-256"):
        made.read_tables(["cpu"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("shards", [1, 2])
def test_on_a_gpu_the_module_has_the_tensors_that_torch_loads(shards: int, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    sharding = "auto" if shards == 1 else "row_wise"
    options = PackageOptions(
        name="m", backend="tessera", device="cuda", shards=shards, sharding=sharding
    )
    write_model(make_model(), path, options)
    made = opening_for_a_device(path)
    load_libraries(made._records.manifest().operator_libraries)
    module = made.module(["cuda:0"] * shards)
    with expected_deprecation():
        expected = torch.jit.load(str(path), map_location="cpu")
    assert len(made._tables) >= shards
    for name, tensor in tensors(expected).items():
        assert tensors(module)[name].device == torch.device("cuda:0")
        assert torch.equal(tensors(module)[name].cpu(), tensor), name


def test_tensors_that_are_named_otherwise_before_the_check_are_refused(
    package: Path, tmp_path: Path
) -> None:
    other, _ = make_package(tmp_path, dim=16, name="other")
    path = Path(shutil.copy(package, tmp_path / "m.pt"))
    records = Records(path)
    made = Opening(records, on_host=True)
    records.check(records.manifest().records, into=made.into)
    made._data = Records(other).read(DATA_RECORD, max_bytes=1 << 20)
    with pytest.raises(PackageError, match="was changed while it was being loaded; load it again"):
        made.module(["cpu"])


def test_what_torch_cannot_open_is_refused(package: Path, tmp_path: Path) -> None:
    path = with_record(package, tmp_path / "m.pt", DATA_RECORD, b"not a pickle")
    with pytest.raises(PackageError, match=r"data\.pkl is not as torch writes it"):
        load_package(path)


def test_torch_is_given_no_extra_files(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    real: Callable[..., Any] = torch.jit.load

    def load(archive: io.BytesIO, **options: object) -> Any:
        seen.append(archive.getvalue())
        return real(archive, **options)

    monkeypatch.setattr("torch.jit.load", load)
    opened(package, on_host=True)
    (content,) = seen
    assert b"extra/tessera" not in content
    assert len(content) < package.stat().st_size
