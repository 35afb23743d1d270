"""The package's manifest: what ``tessera/manifest.json`` inside a model file says.

The packager writes it last, because it names the SHA-256 of every other record; loaders read it
first.  ``FORMAT.md`` describes the file around it.  Reading is strict: a missing key, an unknown
key or a value of the wrong type is an error, and any change of the fields raises
`FORMAT_VERSION`.
"""

from __future__ import annotations

import functools
import json
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from tessera.serving.package.schema import InputSchema

FORMAT_VERSION = 3
"""The version of this layout.  A loader refuses every other."""

MANIFEST_RECORD = "extra/tessera/manifest.json"
"""The manifest's record, below the archive's top folder."""

GOLDEN_RECORD = "extra/tessera/golden.bin"
"""The golden answers' record, below the archive's top folder."""

# The two ways in which a manifest's bytes may end; FORMAT.md fixes them.
_UNSIGNED_END = b'\n "signature": null\n}\n'
_SIGNED_END = re.compile(
    rb'\n "signature": \{\n  "algorithm": "ed25519",\n  "public_key": "[0-9a-f]{64}",\n'
    rb'  "value": "[0-9a-f]{128}"\n \}\n\}\n\Z'
)


@dataclass(frozen=True, kw_only=True)
class Versions:
    """What wrote the package, and which torch may run it.

    Attributes:
        tessera: this project's version.
        torch: the torch version that scripted the model, with its local part.
        fbgemm: the fbgemm-gpu version that quantized the tables; empty where none took part.
        torch_min: the oldest torch ``major.minor`` that may load the package.
        torch_below: the first torch ``major.minor`` that may not.
    """

    tessera: str
    torch: str
    fbgemm: str
    torch_min: str
    torch_below: str


@dataclass(frozen=True, kw_only=True)
class TableInfo:
    """One embedding table as it is stored, and what its quantization cost.

    Attributes:
        name: the table's name, as in the schema's features.
        rows: number of rows.
        dim: embedding dimension.
        dtype: weight type (``int8``, ``int4``, ``int2``, ``fp8``, ``fp16``, ``bf16`` or ``fp32``).
        bytes: bytes of the stored rows, scales and biases included.
        bytes_fp32: bytes of the same table in float32.
        max_abs_error: largest difference of one element from its float32 value.
        rmse: root of the mean squared difference over all elements.
        relative_rmse: ``rmse`` over the root mean square of the float32 elements (0 where the
            table is all zero).
    """

    name: str
    rows: int
    dim: int
    dtype: str
    bytes: int
    bytes_fp32: int
    max_abs_error: float
    rmse: float
    relative_rmse: float


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one piece of a table lives.

    Attributes:
        table: the table's name.
        shard: the number of the shard, from 0 on.
        device: the device that the packager had in mind, ``cpu`` or ``cuda:<shard>``; a loader
            may take others, one per shard.
        row_begin: the piece's first row.
        row_end: the row behind its last.
        column_begin: its first column.
        column_end: the column behind its last.
    """

    table: str
    shard: int
    device: str
    row_begin: int
    row_end: int
    column_begin: int
    column_end: int


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """How the tables are spread over devices."""

    num_shards: int
    placements: tuple[Placement, ...]


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Metrics of one model over the validation set; null where one is not defined."""

    auc: float | None
    normalised_entropy: float | None
    log_loss: float | None
    calibration: float | None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The float32 model and the packaged one over the same rows.

    Attributes:
        rows: validation rows that both models scored.
        fp32: metrics of the trained model.
        packaged: metrics of the scripted, quantized model.
        max_abs_score_error: largest difference of one score.
    """

    rows: int
    fp32: Quality
    packaged: Quality
    max_abs_score_error: float


@dataclass(frozen=True, kw_only=True)
class GoldenInfo:
    """The recorded answers and how closely a loader must meet them.

    An answer ``y`` meets the recorded ``g`` when ``|y - g| <= atol + rtol * |g|``.
    """

    samples: int
    atol: float
    rtol: float


@dataclass(frozen=True, kw_only=True)
class RecordInfo:
    """One record of the archive.

    Attributes:
        sha256: of its content, lower-case hex.
        bytes: of its content.
        crc32: of its content.
        chunks: SHA-256 of each of `tessera.serving.package.hashes.chunk_sizes`.
    """

    sha256: str
    bytes: int
    crc32: int
    chunks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Who vouches for the manifest and with it for the whole file.

    Attributes:
        algorithm: ``ed25519``, the only one.
        public_key: the signer's public key, 64 lower-case hex digits.
        value: the signature, 128 lower-case hex digits; `tessera.serving.package.signing` says of what.
    """

    algorithm: str
    public_key: str
    value: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that a loader, a server or a reader needs to know of a package.

    Attributes:
        format_version: `FORMAT_VERSION` of the writer.
        name: the model's name; a server's default name for it.
        version: the model's version, a free string.
        created: UTC time, ISO 8601 with seconds and ``Z``: of the checkpoint's file where there is one,
            so that packaging it again gives the same bytes, else of packaging.
        versions: software versions.
        backend: whose operators look rows up, ``tessera`` or ``fbgemm``.
        operator_libraries: the libraries to load before the archive is opened, in this order;
            names that `tessera.kernels.libraries` knows.
        schema: inputs and outputs.
        dtype: the weight type of the tables; ``mixed`` where they have several.
        dense_dtype: how the dense layers' weights are stored, ``fp32`` or ``bf16``.
        tables: one entry per table.
        bytes_fp32: bytes of all weights (tables and dense part) before packaging.
        bytes_packaged: bytes of all weights in the package.
        plan: where the tables live.
        device: the kind of device that it runs on, ``cpu``.
        source: where the weights come from: the checkpoint's file name and its step.
        training_metrics: by split, the metrics that training stored with the checkpoint.
        evaluation: metrics before and after quantization, or null where it was skipped.
        golden: about ``golden.bin``.
        records: every record of the archive except the manifest itself, by its name below
            the archive's top folder.
        signature: null where nobody signed.  The last field: `FORMAT.md` fixes its spelling.
    """

    format_version: int
    name: str
    version: str
    created: str
    versions: Versions
    backend: str
    operator_libraries: tuple[str, ...]
    schema: InputSchema
    dtype: str
    dense_dtype: str
    tables: tuple[TableInfo, ...]
    bytes_fp32: int
    bytes_packaged: int
    plan: ShardingPlan
    device: str
    source: Mapping[str, str]
    training_metrics: Mapping[str, Mapping[str, int | float | None]]
    evaluation: Evaluation | None
    golden: GoldenInfo
    records: Mapping[str, RecordInfo]
    signature: Signature | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable form; `from_json` is its inverse."""
        encoded = _encode(self)
        assert isinstance(encoded, dict)
        return encoded

    def to_bytes(self) -> bytes:
        """The record's content: UTF-8 JSON, indented for a human reader."""
        return (json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n").encode()

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """Read what `to_json` wrote.

        Raises:
            ValueError: a key is missing, unknown or of the wrong type; the message names it.
        """
        decoded = _decode(cls, data, "manifest")
        assert isinstance(decoded, Manifest)
        return decoded

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Read what `to_bytes` wrote.

        Raises:
            ValueError: this is not JSON, the format version is another, `from_json` refuses, or
                the signature is spelled in another way than `FORMAT.md` says.
        """
        try:
            data = json.loads(content, object_pairs_hook=_no_key_twice)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the manifest is not JSON: {error}") from error
        found = data.get("format_version") if isinstance(data, dict) else None
        if found != FORMAT_VERSION:
            raise ValueError(
                f"the package's format_version is {found!r}, this tessera reads {FORMAT_VERSION}; "
                "package the model again, or load it with the tessera that wrote it"
            )
        manifest = cls.from_json(data)
        signed_message(content)
        return manifest


def signed_message(content: bytes) -> bytes:
    """What a signature of a manifest's bytes is over: the same bytes without a signature.

    Raises:
        ValueError: the bytes do not end as `FORMAT.md` says.
    """
    if content.endswith(_UNSIGNED_END):
        return content
    found = _SIGNED_END.search(content)
    if found is None:
        raise ValueError("the manifest does not end in a signature, or null, spelled as it must be")
    return content[: found.start()] + _UNSIGNED_END


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Readers of JSON differ in which of two values they take.
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"a key is there twice: {next(k for k in keys if keys.count(k) > 1)!r}")
    return found


def _encode(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


def _decode(kind: Any, data: Any, where: str) -> Any:
    """``data`` as the annotation ``kind``; ``where`` names it in errors."""
    if is_dataclass(kind):
        return _decode_fields(kind, data, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is None:
        whole_float = kind is float and type(data) is int
        return float(data) if whole_float else _expect(data, kind, where)
    if origin is types.UnionType:  # of plain types, or of one dataclass and None
        return data if type(data) in arguments else _decode(arguments[0], data, where)
    if origin is typing.Literal:
        return _expect_one_of(data, arguments, where)
    if origin is tuple:  # only ``tuple[X, ...]`` is used
        items = _expect(data, list, where)
        return tuple(_decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(items))
    assert issubclass(origin, Mapping), kind
    entries = _expect(data, dict, where)
    return {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in entries.items()}


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _decode_fields(kind: Any, data: Any, where: str) -> Any:
    entries = _expect(data, dict, where)
    hints = _hints(kind)
    names = [field.name for field in fields(kind)]
    if entries.keys() != set(names):
        missing = sorted(set(names) - entries.keys())
        unknown = sorted(entries.keys() - set(names))
        raise ValueError(f"{where}: missing keys {missing}, unknown keys {unknown}")
    return kind(**{name: _decode(hints[name], data[name], f"{where}.{name}") for name in names})


def _expect(data: Any, kind: Any, where: str) -> Any:
    # `type() is`, so that true is not taken for an integer.
    if type(data) is not kind:
        raise ValueError(f"{where}: expected {kind.__name__}, found {type(data).__name__}")
    return data


def _expect_one_of(data: Any, allowed: tuple[Any, ...], where: str) -> Any:
    if data not in allowed:
        raise ValueError(f"{where}: expected one of {list(allowed)}, found {data!r}")
    return data
