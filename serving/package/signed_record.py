"""The JSON record that ends an archive: it lists the other records, and may be signed.

A package's manifest and a commit's description are such records: ASCII JSON, indented for a human reader,
whose last field is ``signature``.  `FORMAT.md` fixes how that field is spelled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any

from tessera.serving.package.fields import Between, Count, Hex, OneOf, Sha256, fields_of
from tessera.serving.package.strict_json import read_strictly

# The two ways in which the record's bytes may end; FORMAT.md fixes them.
_UNSIGNED_END = b'\n "signature": null\n}\n'
_SIGNED_END = re.compile(
    rb'\n "signature": \{\n  "algorithm": "ed25519",\n  "public_key": "[0-9a-f]{64}",\n'
    rb'  "value": "[0-9a-f]{128}"\n \}\n\}\n\Z'
)


@dataclass(frozen=True, kw_only=True)
class RecordInfo:
    """One record of the archive.

    Attributes:
        sha256: of its content, lower-case hex.
        bytes: of its content.
        crc32: of its content.
        chunks: SHA-256 of each of `tessera.serving.package.hashes.chunk_sizes`.
    """

    sha256: Sha256
    bytes: Count
    crc32: Annotated[int, Between(0, (1 << 32) - 1)]
    chunks: tuple[Sha256, ...]

    def compared(self) -> tuple[str, ...]:
        """The hashes that a loader compares: of the chunks, or of a content that has none."""
        return tuple(self.chunks) or (self.sha256,)


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Who vouches for the record and with it for the whole file.

    Attributes:
        algorithm: ``ed25519``, the only one.
        public_key: the signer's public key, 64 lower-case hex digits.
        value: the signature, 128 lower-case hex digits; `tessera.serving.package.signing` says of what.
    """

    algorithm: Annotated[str, OneOf(("ed25519",))]
    public_key: Annotated[str, Hex(64)]
    value: Annotated[str, Hex(128)]


def to_record(data: Mapping[str, Any]) -> bytes:
    """The record's content: UTF-8 JSON, indented for a human reader."""
    return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()


def read_ascii_json(content: bytes, what: str, max_marks: int) -> Any:
    """The value that the record writes down.

    Args:
        content: the record's.
        what: names the record in errors.
        max_marks: how many of ``,``, ``:``, ``[`` and ``{`` it may have.

    Raises:
        ValueError: this is not JSON in ASCII, or has more values than it may.
    """
    if not content.isascii():
        raise ValueError(f"{what} has a byte that is not ASCII")
    if sum(content.count(mark) for mark in b",:[{") > max_marks:
        raise ValueError(f"{what} has more than {max_marks} values")
    try:
        return read_strictly(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON: {error}") from error


def signed_message(content: bytes, what: str = "the manifest") -> bytes:
    """What a signature of a record's bytes is over: the same bytes without a signature.

    Args:
        content: the record's.
        what: names the record in errors.

    Raises:
        ValueError: the bytes do not end as `FORMAT.md` says.
    """
    if content.endswith(_UNSIGNED_END):
        return content
    found = _SIGNED_END.search(content)
    if found is None:
        raise ValueError(f"{what} does not end in a signature, or null, spelled as it must be")
    return content[: found.start()] + _UNSIGNED_END


def unsigned_sha256(content: bytes, what: str = "the manifest") -> str:
    """SHA-256 of `signed_message`, lower-case hex: the same whether and by whom the record is signed.

    Raises:
        ValueError: see `signed_message`.
    """
    return hashlib.sha256(signed_message(content, what)).hexdigest()


def encode_fields(value: Any, version: int) -> dict[str, Any]:
    """A dataclass as plain JSON, with the fields that ``version`` of its format has."""
    encoded = _encode(value, version)
    assert isinstance(encoded, dict)
    return encoded


def _encode(value: Any, version: int) -> Any:
    if is_dataclass(value):
        names = [field.name for field in fields_of(type(value), version)]
        return {name: _encode(getattr(value, name), version) for name in names}
    if isinstance(value, Mapping):
        return {key: _encode(item, version) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_encode(item, version) for item in value]
    return value
