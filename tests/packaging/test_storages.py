"""Sizes in data.pkl, found among its opcodes: against what torch itself loads."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tessera.serving.package.layout import ArchiveWriter
from tessera.serving.package.records import Records
from tessera.serving.package.storages import DATA_RECORD, byte_storages, resized, storage_bytes
from tessera.serving.package.torchscript import expected_deprecation
from tests.package_factory import package_file


class Part(nn.Module):
    """A module that holds a tensor of another."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows: Tensor
        self.register_buffer("rows", rows)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rows[0]


class Whole(nn.Module):
    """Bytes in every way in which a module may hold them."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        table = torch.arange(rows, dtype=torch.int64).to(torch.uint8)
        for name, tensor in {
            "table": table,
            "again": table,
            "square": torch.zeros(10, 10, dtype=torch.uint8),
            "first_part": torch.zeros(300, dtype=torch.uint8)[:100],
            "later": torch.zeros(50, dtype=torch.uint8)[10:],
            "numbers": torch.arange(400.0),
            "small": torch.ones(3, dtype=torch.uint8),
        }.items():
            self.register_buffer(name, tensor)
        self.part = Part(table)
        self.dense = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.dense(x))


def saved(module: nn.Module) -> dict[str, bytes]:
    buffer = io.BytesIO()
    with expected_deprecation():
        torch.jit.save(torch.jit.script(module), buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}


def loaded(records: dict[str, bytes]) -> torch.jit.ScriptModule:
    buffer = io.BytesIO()
    writer = ArchiveWriter(buffer)
    for name, content in records.items():
        writer.add(name, [content], len(content))
    writer.finish()
    buffer.seek(0)
    with expected_deprecation():
        return torch.jit.load(buffer)


@pytest.mark.parametrize("rows", [200, 300, 70_000])
@pytest.mark.parametrize("size", [1, 255, 256, 65_536])
def test_every_tensor_of_a_storage_gets_the_new_size(rows: int, size: int) -> None:
    records = saved(Whole(rows))
    keys = byte_storages(records[DATA_RECORD])
    # The table and the small one; the others are not bytes, or not all of theirs.
    assert {len(records[f"data/{key}"]) for key in keys} == {rows, 3}
    (key,) = (key for key in keys if len(records[f"data/{key}"]) == rows)
    records[DATA_RECORD] = resized(records[DATA_RECORD], {key: size})
    records[f"data/{key}"] = bytes([7]) * size
    module = loaded(records)
    for tensor in (module.table, module.again, module.part.rows):
        assert torch.equal(tensor, torch.full((size,), 7, dtype=torch.uint8))
    assert module.table.data_ptr() == module.part.rows.data_ptr()
    assert torch.equal(module.numbers, torch.arange(400.0))
    assert torch.equal(module.small, torch.ones(3, dtype=torch.uint8))
    assert module.first_part.shape == (100,)


def test_the_old_size_gives_the_old_bytes() -> None:
    records = saved(Whole(70_000))
    content = records[DATA_RECORD]
    sizes = {key: len(records[f"data/{key}"]) for key in byte_storages(content)}
    larger = resized(content, dict.fromkeys(sizes, 1 << 40))
    assert len(larger) > len(content)
    assert resized(larger, sizes) == content


def test_a_packages_tables_are_found(package: Path) -> None:
    records = Records(package)
    keys = byte_storages(records.read(DATA_RECORD, max_bytes=1 << 20))
    table_bytes = sum(table.bytes for table in records.manifest().tables)
    largest = max(entry.bytes for entry in records.entries if entry.name.startswith("data/"))
    assert largest >= table_bytes
    assert largest in {e.bytes for e in records.entries if e.name.removeprefix("data/") in keys}


@pytest.mark.parametrize(
    ("opcodes", "reason"),
    [
        (b")" + b"\x85" * 1001, "its values lie in one another more than 1000 times"),
        (b")" + b"\x85" * 200_000, "its values lie in one another more than 1000 times"),
        (b"]" * 200_000 + b"a" * 199_999, "its values lie in one another more than 1000 times"),
        (b"(" + b"N" * 600_000 + b"t", "it has more than 524288 opcodes"),
        (b"(" + b"}" * 33_000 + b"t", "a dictionary counted as 16"),
        (b"]q\x01h\x01)a", "it fills a container that it has named again"),
        (b"]2)a", "it fills a container that it has named again"),
        (b"t", "is not as torch writes it"),
    ],
)
def test_what_lies_too_deep_is_refused(opcodes: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        storage_bytes(b"\x80\x02" + opcodes + b".")


def test_what_lies_as_deep_as_it_may_is_read() -> None:
    assert storage_bytes(b"\x80\x02)" + b"\x85" * 1000 + b".") == {}
    # A depth is that of the deepest value, and what was taken away does not count.
    halves = b")" + b"\x85" * 999
    assert storage_bytes(b"\x80\x02" + halves + b"0(" + halves + halves + b"t.") == {}


def test_damage_ends_in_a_value_error_and_nothing_else(tmp_path: Path) -> None:
    path = package_file(tmp_path)
    content = Records(path).read(DATA_RECORD, max_bytes=1 << 20)
    draw = random.Random(0)
    refused = []
    for _ in range(2000):
        damaged = bytearray(content)
        for _ in range(draw.randrange(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        cut = bytes(damaged[: draw.choice([len(damaged), draw.randrange(len(damaged))])])
        try:
            resized(cut, dict.fromkeys(byte_storages(cut), 9))
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 500
    assert all("data.pkl is not as torch writes it" in reason for reason in refused)
