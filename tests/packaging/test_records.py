"""Whatever was changed in a package, it is found before anything of it runs."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import random
import shutil
import struct
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.serving.package import layout
from tessera.serving.package.layout import (
    ArchiveWriter,
    Entry,
    LayoutError,
    directory_and_end,
    local_header,
    read_layout,
)
from tessera.serving.package.loading import load_package, open_checked
from tessera.serving.package.manifest import GOLDEN_RECORD, MANIFEST_RECORD, Manifest
from tessera.serving.package.records import PackageError, Records
from tessera.serving.package.torchscript import expected_deprecation
from tessera.training.models.config import TableConfig
from tests.package_factory import make_package
from tests.packaging.archives import as_version_3, read_records, with_manifest, write_records

DAMAGES = 10_000


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("the archive was opened by torch")

    monkeypatch.setattr("torch.jit.load", opened)
    monkeypatch.setattr("torch.ops.load_library", opened)


@pytest.fixture(scope="module")
def small_package(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of one feature, with the kinds of records of `package`, whose manifest takes longer to read."""
    features = {"user": TableConfig(rows=100)}
    folder = tmp_path_factory.mktemp("small")
    path, _ = make_package(folder, name="small", num_dense=2, features=features)
    kinds, same = ({Path(name).parts[0] for name in read_records(each)} for each in (package, path))
    assert same == kinds
    return path


def refused(path: Path, message: str) -> None:
    with pytest.raises(PackageError, match=message) as caught:
        load_package(path)
    assert str(path) in str(caught.value)


def test_a_copy_with_the_same_records_is_the_same_file(package: Path, tmp_path: Path) -> None:
    # So that the refusals below are not the copy's fault.
    copy = write_records(tmp_path / "copy.pt", read_records(package))
    assert copy.read_bytes() == package.read_bytes()
    assert open_checked(package).sha256() == hashlib.sha256(package.read_bytes()).hexdigest()


def test_other_readers_of_zip_see_the_same_records(package: Path) -> None:
    with zipfile.ZipFile(package) as archive:
        assert archive.testzip() is None
        seen = {name.removeprefix("model/"): archive.read(name) for name in archive.namelist()}
    assert seen == read_records(package)


def test_contents_begin_where_tensors_may_be_mapped(package: Path) -> None:
    for entry in open_checked(package).records.entries:
        assert entry.content_offset % 64 == 0


def test_ten_thousand_flips_and_cuts_are_all_refused(
    small_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One random byte changed to another one, anywhere; or the file's end cut off."""
    # A manifest of the same bytes, which is read before the other records are, is parsed once.
    monkeypatch.setattr(Manifest, "from_bytes", functools.cache(Manifest.from_bytes))
    good = small_package.read_bytes()
    path = tmp_path / "m.pt"
    path.write_bytes(good)
    draw = random.Random(0)
    with path.open("r+b", buffering=0) as stream:
        for _ in range(DAMAGES * 9 // 10):
            place = draw.randrange(len(good))
            stream.seek(place)
            stream.write(bytes([good[place] ^ draw.randrange(1, 256)]))
            with pytest.raises(PackageError):
                open_checked(path)
            stream.seek(place)
            stream.write(good[place : place + 1])
        assert open_checked(path).sha256() == hashlib.sha256(good).hexdigest()
        for _ in range(DAMAGES // 10):
            stream.truncate(draw.randrange(len(good)))
            with pytest.raises(PackageError, match="cut short or no package at all"):
                open_checked(path)
            stream.truncate(0)
            stream.seek(0)
            stream.write(good)


def test_every_byte_around_the_contents_counts(small_package: Path) -> None:
    """Not a sample: each byte of each header, padding, directory entry and end."""
    good = bytearray(small_package.read_bytes())
    inside = bytearray(len(good))
    for entry in open_checked(small_package).records.entries:
        inside[entry.content_offset : entry.end_offset] = b"\1" * entry.bytes
    outside = [place for place, content in enumerate(inside) if not content]
    assert len(outside) > 1000
    for place in outside:
        for change in (1, 0x80, 0xFF):
            good[place] ^= change
            with pytest.raises(LayoutError):
                read_layout(io.BytesIO(good), len(good))
            good[place] ^= change
    assert read_layout(io.BytesIO(good), len(good))


@settings(max_examples=200)
@given(data=st.data())
def test_several_damages_at_once_are_refused_by_the_whole_loader(
    data: st.DataObject, package: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(package.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(content) - 1))
        new = data.draw(st.binary(min_size=1, max_size=40))
        if data.draw(st.booleans()):
            content[begin : begin + len(new)] = new
        else:
            content[begin:begin] = new
    if content == package.read_bytes():
        return
    path = tmp_path_factory.mktemp("damage") / "m.pt"
    path.write_bytes(content)
    refused(path, "package")


def test_a_flipped_byte_in_any_record_is_found_and_named(package: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    for entry in open_checked(package).records.entries:
        if entry.name == MANIFEST_RECORD or not entry.bytes:
            continue
        changed = bytearray(package.read_bytes())
        changed[entry.content_offset + entry.bytes // 2] ^= 1
        path.write_bytes(changed)
        why = rf"changed: SHA-256 \w+ of {entry.bytes} bytes|damaged: its CRC-32 does not hold"
        refused(path, rf"record '{entry.name}' (is|was) ({why})")
        records = {**read_records(package), entry.name: bytes(entry.bytes)}
        refused(
            write_records(path, records), f"the header of record '{entry.name}' was changed: CRC-32"
        )


def test_a_checksum_that_was_changed_in_both_headers_is_found(
    package: Path, tmp_path: Path
) -> None:
    # The layout alone cannot tell: the two agree.
    entry = next(e for e in open_checked(package).records.entries if e.name == "constants.pkl")
    old, new = (struct.pack("<I", crc) for crc in (entry.crc32, entry.crc32 ^ 1))
    content = package.read_bytes()
    assert content.count(old) == 2
    path = tmp_path / "m.pt"
    path.write_bytes(content.replace(old, new))
    refused(
        path, r"header of record 'constants.pkl' was changed: CRC-32 \w{8}, the manifest says \w{8}"
    )


def test_bytes_around_the_archive_are_found(package: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(package.read_bytes() + b"\0")
    refused(path, "end record is not at the file's end")
    path.write_bytes(b"#!/bin/sh\n" + package.read_bytes())
    refused(path, "directory is not where its end record says")


def test_an_extra_record_is_found_and_named(package: Path, tmp_path: Path) -> None:
    records = read_records(package) | {"code/__torch__/evil.py": b"x"}
    path = write_records(tmp_path / "m.pt", records)
    refused(path, "not listed in the manifest: code/__torch__/evil.py")


@pytest.mark.parametrize("name", [GOLDEN_RECORD, "constants.pkl"])
def test_a_missing_record_is_found_and_named(name: str, package: Path, tmp_path: Path) -> None:
    records = read_records(package)
    del records[name]
    refused(write_records(tmp_path / "m.pt", records), f"records are missing: {name}")


def test_records_in_another_order_are_refused(package: Path, tmp_path: Path) -> None:
    *others, manifest = read_records(package).items()
    path = write_records(tmp_path / "m.pt", dict([*reversed(others), manifest]))
    refused(path, "not in the order of their names")
    path = write_records(tmp_path / "m.pt", dict([manifest, *others]))
    refused(path, "not in the order of their names")


def test_a_record_that_is_there_twice_is_found(package: Path, tmp_path: Path) -> None:
    with (tmp_path / "m.pt").open("w+b") as stream:
        writer = ArchiveWriter(stream)
        for name, content in [*read_records(package).items(), ("data.pkl", b"another")]:
            writer.add(name, [content], len(content))
        writer.finish()
    refused(tmp_path / "m.pt", "record 'data.pkl' is there twice")


@pytest.mark.parametrize(
    "name",
    [
        *("/etc/passwd", "model/../x", "model//x", "model/./x", "other/x", "model\\x", "x"),
        *("model/a\\b", "model/ü", "model/a b", "model/a\n", "model/", "../model/x"),
    ],
)
def test_a_name_that_leaves_the_archive_is_refused(
    name: str, package: Path, tmp_path: Path
) -> None:
    path = shutil.copy(package, tmp_path / "m.pt")
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, b"x")
    refused(path, "has a name that no package uses")
    if name.startswith("model/"):
        writer = ArchiveWriter(io.BytesIO())
        with pytest.raises(LayoutError, match="has a name that no package uses"):
            writer.add(name.removeprefix("model/"), [b"x"], 1)


def test_compressed_records_are_refused(package: Path, tmp_path: Path) -> None:
    # A few bytes could otherwise become more than there is memory for.
    path = tmp_path / "m.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in read_records(package).items():
            archive.writestr(f"model/{name}", content)
        archive.writestr("model/zeros", bytes(10_000_000))
    refused(path, "cut short or no package at all .the header of record")


@pytest.mark.parametrize("size", [1 << 40, 0xFFFFFFFF, 0xFFFFFFFE])
def test_a_record_that_says_it_is_larger_than_the_file_is_refused(
    size: int, tmp_path: Path
) -> None:
    entry = Entry(name="data/0", bytes=size, crc32=0, header_offset=0)
    path = tmp_path / "m.pt"
    path.write_bytes(local_header(entry) + bytes(100) + directory_and_end([entry]))
    refused(path, "directory is not where its end record says")


def test_a_directory_of_any_size_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "MAX_DIRECTORY_BYTES", 100)
    path = write_records(tmp_path / "m.pt", {f"data/{number}": b"" for number in range(3)})
    refused(path, r"directory has \d{3} bytes")


def test_archives_beyond_four_gigabytes_are_laid_out_as_zip64(tmp_path: Path) -> None:
    """Holes instead of contents: the file takes no space."""
    large = 5 << 30
    first = Entry(name="a", bytes=large, crc32=0x1234, header_offset=0)
    second = Entry(name="b", bytes=3, crc32=0x352441C2, header_offset=first.end_offset)
    path = tmp_path / "large.pt"
    with path.open("wb") as stream:
        for entry in (first, second):
            stream.seek(entry.header_offset)
            stream.write(local_header(entry))
        stream.write(b"abc" + directory_and_end([first, second]))
    with path.open("rb") as stream:
        assert read_layout(stream, path.stat().st_size) == [first, second]
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        assert [(info.file_size, info.header_offset) for info in infos] == [
            (large, 0),
            (3, first.end_offset),
        ]
        assert archive.read("model/b") == b"abc"
    content = bytearray(directory_and_end([first, second]))
    for place in range(len(content)):
        content[place] ^= 1
        with path.open("r+b") as stream:
            stream.seek(-len(content), 2)
            stream.write(content)
        with path.open("rb") as stream, pytest.raises(LayoutError):
            read_layout(stream, path.stat().st_size)
        content[place] ^= 1


def test_a_model_without_manifest_is_refused(package: Path, tmp_path: Path) -> None:
    path = tmp_path / "plain.pt"
    with expected_deprecation():
        torch.jit.script(torch.nn.Linear(1, 1)).save(str(path))
    refused(path, "no package at all")
    records = read_records(package)
    del records[MANIFEST_RECORD]
    path = write_records(tmp_path / "m.pt", records)
    refused(path, f"has no {MANIFEST_RECORD}: it was not written by package-model")


def test_another_format_version_is_refused(package: Path, tmp_path: Path) -> None:
    path = with_manifest(package, tmp_path / "m.pt", lambda data: data.update(format_version=2))
    refused(path, "format_version is 2, this tessera reads 3 to 5; package the model again")


def test_version_3_is_read_as_it_was(package: Path, tmp_path: Path) -> None:
    path = as_version_3(package, tmp_path / "m.pt")
    old, new = Records(path).manifest(), Records(package).manifest()
    assert (old.format_version, old.schema.dense_transform) == (3, "log1p")
    assert not any(feature.strings for feature in old.schema.features)
    # It is written again as it was.
    assert Manifest.from_bytes(old.to_bytes()) == old
    assert old.to_bytes() == read_records(path)[MANIFEST_RECORD]
    assert dataclasses.replace(old, format_version=new.format_version, schema=new.schema) == new


def test_a_manifest_of_two_meanings_is_refused(package: Path, tmp_path: Path) -> None:
    records = read_records(package)
    text = records[MANIFEST_RECORD]
    for changed, message in (
        (text.replace(b'"name"', b'"name": "other",\n "name"', 1), "a key is there twice: 'name'"),
        (text.removesuffix(b"\n"), "spelled as it must be"),
        (json.dumps(json.loads(text)).encode(), "spelled as it must be"),
        (b"[" * 100_000, "is not JSON"),
    ):
        assert changed != text
        path = write_records(tmp_path / "m.pt", {**records, MANIFEST_RECORD: changed})
        refused(path, message)


def test_no_record_is_read_beyond_what_it_may_have(package: Path) -> None:
    records = open_checked(package).records
    with pytest.raises(PackageError, match=rf"record '{GOLDEN_RECORD}' has \d+ bytes, more than 9"):
        records.read(GOLDEN_RECORD, max_bytes=9)
    with pytest.raises(PackageError, match="record 'nothing' is missing"):
        records.read("nothing", max_bytes=9)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nothing.pt", "cannot be read: No such file")
    refused(tmp_path, "is not a file; give the MODEL.pt")
    empty = tmp_path / "empty.pt"
    empty.touch()
    refused(empty, "too short")


def test_a_manifest_too_large_to_be_one_is_refused(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Records, "kind", dataclasses.replace(Records.kind, max_last_bytes=100))
    refused(package, "bytes, more than 100")
