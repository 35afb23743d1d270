"""What a commit says of itself: ``commit.json``, the last record of a commit's file.

A commit is a patch of the records of a package: bytes for some of them, and the answers that the
patched model gives.  `FORMAT.md`, "Commits", describes the file around it.  Reading is as strict as that of the
manifest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from tessera.serving.package.fields import MAX_INT, Between, Count, Positive, Sha256, decode
from tessera.serving.package.manifest import GoldenInfo
from tessera.serving.package.signed_record import (
    RecordInfo,
    Signature,
    encode_fields,
    read_ascii_json,
    signed_message,
    to_record,
)

COMMIT_FORMAT_VERSION = 1
"""The version of a commit's layout."""

COMMIT_TOP_FOLDER = "commit"
"""The folder that all records of a commit lie in."""

COMMIT_RECORD = "commit.json"
"""The last record."""

COMMIT_GOLDEN_RECORD = "golden.bin"
"""The golden answers of the state after the commit, in the form of a package's."""

COMMIT_PACKAGE_RECORD = "package.json"
"""The unsigned manifest of the package of the same state, where the commit was made of a checkpoint."""

MAX_COMMIT_NUMBER = 99_999_999
"""A file's name has eight digits."""

MAX_COMMIT_JSON_BYTES = 16 << 20
MAX_COMMIT_MARKS = 400_000
"""As of a manifest: ``,``, ``:``, ``[`` and ``{``."""

MAX_PATCHED_ROW = (1 << 32) - 1
"""The numbers of patched rows have 32 bits."""

REFUSALS = (
    "gap",
    "repeat",
    "base",
    "chain",
    "fenced",
    "damaged",
    "unsigned",
    "schema",
    "golden",
    "memory",
)
"""Why a server stops at a commit: the label ``reason`` of ``tessera_commits_refused_total``.

``gap``: a number is missing; ``repeat``: the file holds a commit that was applied before; ``base``: it is of another
model, version or package; ``chain``: the commit before it is another; ``fenced``: it builds on one that was
fenced off, or is one; ``damaged``: the file's bytes are not what they were; ``unsigned``: no trusted signature holds;
``schema``: it is of another format, or its patches do not fit the package; ``golden``: the patched model gives
other answers; ``memory``: there is no room to stage it.
"""

_RECORDS = re.compile(r"(rows|bytes)/(0|[1-9][0-9]{0,8})|golden\.bin|package\.json")
_PATCHED = re.compile(r"data/(0|[1-9][0-9]{0,8})")


@dataclass(frozen=True, kw_only=True)
class Patch:
    """New bytes for one record of the package.

    Row ``r`` of the patch is the record's bytes ``[offset + r * stride, offset + r * stride + width)``.

    Attributes:
        record: the package's record, ``data/N``.
        table: the table whose rows these are; empty where the record is not a table's.
        offset: the record's byte at which row 0 begins.
        stride: bytes from one row to the next; at least ``width``.
        width: bytes of a row.
        count: how many rows are patched.
        rows: the commit's record with the rows' numbers, uint32 little-endian in strictly ascending
            order; empty: they are 0, 1, ... ``count - 1``.
        bytes: the commit's record with the new bytes, ``count * width`` of them, row after row.
    """

    record: str
    table: str
    offset: Count
    stride: Positive
    width: Positive
    count: Annotated[int, Between(1, MAX_PATCHED_ROW + 1)]
    rows: str
    bytes: str


@dataclass(frozen=True, kw_only=True)
class Commit:
    """Everything that a server needs to know of a commit.

    Attributes:
        format_version: `COMMIT_FORMAT_VERSION`.
        model: the model's name, that of its folder.
        version: the number of the version that it is for.
        number: its own number, that of its file.
        base: `unsigned_sha256` of the manifest of the version's package.
        previous: `unsigned_sha256` of the ``commit.json`` of the commit before; of the first one, ``base``.
        newest_example_s: when the newest training example was made, seconds since 1970; null: not known.
        created_s: when the state was taken, seconds since 1970.
        step: the training step of the state; null: not known.
        patches: applied in their order.
        golden: about ``golden.bin``.
        records: every record of the file except this one.
        signature: null where nobody signed.  The last field, as in a manifest.
    """

    format_version: Annotated[int, Between(COMMIT_FORMAT_VERSION, COMMIT_FORMAT_VERSION)]
    model: str
    version: Annotated[int, Between(1, MAX_INT)]
    number: Annotated[int, Between(1, MAX_COMMIT_NUMBER)]
    base: Sha256
    previous: Sha256
    newest_example_s: float | None
    created_s: float
    step: Count | None
    patches: tuple[Patch, ...]
    golden: GoldenInfo
    records: Mapping[str, RecordInfo]
    signature: Signature | None = None

    def to_bytes(self) -> bytes:
        """The record's content."""
        return to_record(encode_fields(self, COMMIT_FORMAT_VERSION))

    @classmethod
    def from_bytes(cls, content: bytes) -> Commit:
        """Read what `to_bytes` wrote, and check what can be without the package.

        Raises:
            ValueError: this is not JSON in ASCII, a key is missing, unknown or of the wrong type, the
                records are not those that the patches name, or the signature is spelled in another way
                than `FORMAT.md` says.
        """
        data = read_ascii_json(content, COMMIT_RECORD, MAX_COMMIT_MARKS)
        found = data.get("format_version") if isinstance(data, dict) else None
        if type(found) is not int or found != COMMIT_FORMAT_VERSION:
            shown = found if type(found) is int else "missing"
            raise ValueError(
                f"the commit's format_version is {shown}, this tessera reads {COMMIT_FORMAT_VERSION}; "
                "publish with the tessera that serves"
            )
        signed_message(content, COMMIT_RECORD)
        commit = decode(cls, data, "commit", COMMIT_FORMAT_VERSION)
        assert isinstance(commit, Commit)
        commit._check()  # noqa: SLF001 - its own
        return commit

    def _check(self) -> None:
        """What no single field's rule says."""
        for name in self.records:
            if not _RECORDS.fullmatch(name):
                raise ValueError(f"commit.records: {name!r} is not a record that commits have")
        named = {COMMIT_GOLDEN_RECORD}
        for place, patch in enumerate(self.patches):
            where = f"commit.patches[{place}]"
            if not _PATCHED.fullmatch(patch.record):
                raise ValueError(f"{where}.record: {patch.record!r} is not one that can be patched")
            if patch.width > patch.stride:
                raise ValueError(
                    f"{where}.width: is {patch.width}, more than the stride, {patch.stride}"
                )
            if patch.bytes in named:
                raise ValueError(f"{where}.bytes: {patch.bytes!r} is named twice")
            named.add(patch.bytes)
            self._check_size(where, "bytes", patch.bytes, patch.count * patch.width)
            if patch.rows:
                self._check_size(where, "rows", patch.rows, patch.count * 4)
        named |= {patch.rows for patch in self.patches if patch.rows}
        if missing := sorted(named - self.records.keys()):
            raise ValueError(f"commit.records: {missing[0]!r} is missing")
        if extra := sorted(self.records.keys() - named - {COMMIT_PACKAGE_RECORD}):
            raise ValueError(f"commit.records: {extra[0]!r} is named by no patch")

    def _check_size(self, where: str, kind: str, name: str, expected: int) -> None:
        if not name.startswith(f"{kind}/"):
            raise ValueError(f"{where}.{kind}: {name!r} is not the name of such a record")
        info = self.records.get(name)
        if info is None or info.bytes != expected:
            has = "is missing" if info is None else f"has {info.bytes} bytes"
            raise ValueError(f"{where}.{kind}: record {name!r} of {expected} bytes {has}")

    def check_fits(self, sizes: Mapping[str, int]) -> None:
        """Whether every patch lies within the package's records; rows' numbers are looked at elsewhere.

        Args:
            sizes: bytes of the package's records.

        Raises:
            ValueError: a record is missing or too short.
        """
        for place, patch in enumerate(self.patches):
            size = sizes.get(patch.record)
            if size is None:
                raise ValueError(
                    f"commit.patches[{place}].record: the package has no {patch.record!r}"
                )
            rows = patch.count if not patch.rows else 1
            if patch.offset + (rows - 1) * patch.stride + patch.width > size:
                raise ValueError(
                    f"commit.patches[{place}]: reaches past the {size} bytes of {patch.record!r}"
                )
