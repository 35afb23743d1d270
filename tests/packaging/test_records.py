"""Whatever was changed in a package, it is found before anything of it runs."""

from __future__ import annotations

import hashlib
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from archives import read_records, top_folder, with_manifest, write_records
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.serving.loading import load_package
from tessera.serving.manifest import GOLDEN_RECORD, MANIFEST_RECORD
from tessera.serving.records import PackageError, Records, file_sha256
from tessera.serving.torchscript import expected_deprecation


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("the archive was opened by torch")

    monkeypatch.setattr("torch.jit.load", opened)
    monkeypatch.setattr("torch.ops.load_library", opened)


def refused(path: Path, message: str) -> None:
    with pytest.raises(PackageError, match=message) as caught:
        load_package(path)
    assert str(path) in str(caught.value)


def test_a_copy_with_the_same_records_passes_every_check(package: Path, tmp_path: Path) -> None:
    # So that the refusals below are not the copy's fault.
    copy = write_records(tmp_path / "copy.pt", read_records(package))
    records = Records(copy)
    records.check(records.manifest().records)
    assert file_sha256(package) == hashlib.sha256(package.read_bytes()).hexdigest()


def test_a_flipped_byte_in_any_record_is_found_and_named(package: Path, tmp_path: Path) -> None:
    records = read_records(package)
    for name, content in records.items():
        if not content:
            continue
        changed = bytearray(content)
        changed[len(changed) // 2] ^= 1
        path = write_records(tmp_path / "m.pt", {**records, name: bytes(changed)})
        short = name.split("/", 1)[1]
        if short == MANIFEST_RECORD:
            with pytest.raises(PackageError):
                # A flip in the middle of the manifest hits a hash, a number or a name.
                load_package(path)
        else:
            refused(path, rf"record '{short}' was changed: SHA-256 \w+ of {len(content)} bytes")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_flipped_byte_of_the_file_is_found_or_changes_no_record(
    data: st.DataObject, package: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(package.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("flip") / "m.pt"
    path.write_bytes(content)
    try:
        records = Records(path)
        records.check(records.manifest().records)
    except PackageError:
        return
    # Padding between records, or a field that readers do not use.
    assert read_records(path) == read_records(package)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_truncated_file_is_found(
    data: st.DataObject, package: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = package.read_bytes()
    path = tmp_path_factory.mktemp("cut") / "m.pt"
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    refused(path, "is damaged, cut short or no package at all")


def test_bytes_after_the_archive_are_found(package: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(package.read_bytes() + b"\0")
    refused(path, "end record is not at the file's end")


def test_bytes_before_the_archive_are_found(package: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(b"#!/bin/sh\n" + package.read_bytes())
    refused(path, "does not begin at the file's first byte")


def test_an_extra_record_is_found_and_named(package: Path, tmp_path: Path) -> None:
    records = read_records(package)
    extra = f"{top_folder(records)}/code/__torch__/evil.py"
    path = write_records(tmp_path / "m.pt", {**records, extra: b"x"})
    refused(path, "not listed in the manifest: code/__torch__/evil.py")


def test_a_missing_record_is_found_and_named(package: Path, tmp_path: Path) -> None:
    records = read_records(package)
    for name in (f"{top_folder(records)}/{GOLDEN_RECORD}", f"{top_folder(records)}/constants.pkl"):
        fewer = {other: content for other, content in records.items() if other != name}
        path = write_records(tmp_path / "m.pt", fewer)
        refused(path, f"records are missing: {name.split('/', 1)[1]}")


def test_a_record_that_is_there_twice_is_found(package: Path, tmp_path: Path) -> None:
    records = read_records(package)
    name = f"{top_folder(records)}/data.pkl"
    path = write_records(tmp_path / "m.pt", records)
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as archive:
        warnings.simplefilter("ignore")  # that is what the test is about
        archive.writestr(name, b"another")
    refused(path, "record 'data.pkl' is there twice")


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "model/../x",
        "model//x",
        "model/./x",
        "other/x",
        "model\\x",
        "x",
        "model/a\\b",
    ],
)
def test_a_name_that_leaves_the_archive_is_refused(
    name: str, package: Path, tmp_path: Path
) -> None:
    path = write_records(tmp_path / "m.pt", {**read_records(package), name: b"x"})
    refused(path, "has a name that no package uses")


def test_a_model_without_manifest_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plain.pt"
    with expected_deprecation():
        torch.jit.script(torch.nn.Linear(1, 1)).save(str(path))
    refused(path, f"has no {MANIFEST_RECORD}: it was not written by package-model")


def test_another_format_version_is_refused(package: Path, tmp_path: Path) -> None:
    path = with_manifest(package, tmp_path / "m.pt", lambda data: data.update(format_version=2))
    refused(path, "format_version is 2, this tessera reads 1; package the model again")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nothing.pt", "cannot be read: No such file")
    refused(tmp_path, "is not a file; give the MODEL.pt")
    empty = tmp_path / "empty.pt"
    empty.touch()
    refused(empty, "too short")


def test_a_manifest_too_large_to_be_one_is_refused(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera.serving.records._MAX_MANIFEST_BYTES", 100)
    refused(package, "bytes, more than 100")
