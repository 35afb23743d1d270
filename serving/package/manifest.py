"""The package's manifest: what ``tessera/manifest.json`` inside a model file says.

The packager writes it last, because it names the SHA-256 of every other record; loaders read it
first.  ``FORMAT.md`` describes the file around it.  Reading is strict: a missing key, an unknown
key or a value of the wrong type is an error, and any change of the fields raises
`FORMAT_VERSION`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from tessera.serving.package.evaluation import Evaluation
from tessera.serving.package.fields import (
    Between,
    Count,
    NotNegative,
    OneOf,
    Positive,
    Release,
    decode,
)
from tessera.serving.package.schema import RAW_SINCE, InputSchema
from tessera.serving.package.signed_record import (
    RecordInfo,
    Signature,
    encode_fields,
    read_ascii_json,
    signed_message,
    to_record,
)
from tessera.serving.package.strict_json import first_twice

FORMAT_VERSION = 5
"""The version of this layout, which the packager writes."""

OLDEST_FORMAT_VERSION = 3
"""The oldest version that loaders still read; they refuse those before it and those after ours."""

MANIFEST_RECORD = "extra/tessera/manifest.json"
"""The manifest's record, below the archive's top folder."""

GOLDEN_RECORD = "extra/tessera/golden.bin"
"""The golden answers' record, below the archive's top folder."""

MAX_MANIFEST_BYTES = 16 << 20
MAX_MANIFEST_MARKS = 400_000
"""How many of ``,``, ``:``, ``[`` and ``{`` a manifest may have: 5,000 features with their tables, and a
terabyte of these, have fewer.  A JSON reader needs up to 200 bytes for each."""
MAX_SHARDS = 4096


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
    torch_min: Release
    torch_below: Release


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
    rows: Positive
    dim: Positive
    dtype: str
    bytes: Count
    bytes_fp32: Count
    max_abs_error: NotNegative
    rmse: NotNegative
    relative_rmse: NotNegative


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
    shard: Annotated[int, Between(0, MAX_SHARDS - 1)]
    device: str
    row_begin: Count
    row_end: Count
    column_begin: Count
    column_end: Count

    @classmethod
    def of(
        cls, table: str, shard: int, device: str, rows: tuple[int, int], columns: tuple[int, int]
    ) -> Placement:
        """A piece from the first row and column to the ones behind its last."""
        spans = dict(
            zip(
                ("row_begin", "row_end", "column_begin", "column_end"),
                (*rows, *columns),
                strict=True,
            )
        )
        return cls(table=table, shard=shard, device=device, **spans)


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """How the tables are spread over devices."""

    num_shards: Annotated[int, Between(1, MAX_SHARDS)]
    placements: tuple[Placement, ...]


@dataclass(frozen=True, kw_only=True)
class GoldenInfo:
    """The recorded answers and how closely a loader must meet them.

    An answer ``y`` meets the recorded ``g`` when ``|y - g| <= atol + rtol * |g|``.
    """

    samples: Count
    atol: NotNegative
    rtol: NotNegative


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that a loader, a server or a reader needs to know of a package.

    Attributes:
        format_version: `FORMAT_VERSION` of the writer, which decides what fields there are.
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
        dense_dtype: how the dense layers' weights are stored, ``fp32``, ``bf16`` or ``fp8``.
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

    format_version: Annotated[int, Between(OLDEST_FORMAT_VERSION, FORMAT_VERSION)]
    name: str
    version: str
    created: str
    versions: Versions
    backend: str
    operator_libraries: tuple[str, ...]
    schema: InputSchema
    dtype: str
    dense_dtype: Annotated[str, OneOf(("fp32", "bf16", "fp8"))]
    tables: tuple[TableInfo, ...]
    bytes_fp32: Count
    bytes_packaged: Count
    plan: ShardingPlan
    device: Annotated[str, OneOf(("cpu", "cuda"))]
    source: Mapping[str, str]
    training_metrics: Mapping[str, Mapping[str, int | float | None]]
    evaluation: Evaluation | None
    golden: GoldenInfo
    records: Mapping[str, RecordInfo]
    signature: Signature | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable form; `from_json` is its inverse."""
        return encode_fields(self, self.format_version)

    def to_bytes(self) -> bytes:
        """The record's content: UTF-8 JSON, indented for a human reader."""
        return to_record(self.to_json())

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """Read what `to_json` wrote.

        Raises:
            ValueError: a key is missing, unknown or of the wrong type; the message names it.
        """
        version = _format_version(data)
        decoded = decode(cls, data, "manifest", version)
        assert isinstance(decoded, Manifest)
        decoded._check()  # noqa: SLF001 - its own
        return decoded

    def _check(self) -> None:
        """What no single field's rule says."""
        dense, columns = self.schema.dense_features, self.schema.dense_columns
        if self.format_version >= RAW_SINCE and len(columns) != len(dense):
            raise ValueError(
                f"manifest.schema.dense_columns: has {len(columns)} names, expected {len(dense)}"
            )
        _check_ranges(self.schema)
        if not self.schema.outputs:
            raise ValueError("manifest.schema.outputs: there is none")
        for where, names in {
            "schema.features": [feature.name for feature in self.schema.features],
            "schema.outputs": [output.name for output in self.schema.outputs],
            "tables": [table.name for table in self.tables],
        }.items():
            if len(set(names)) != len(names):
                raise ValueError(f"manifest.{where}: {first_twice(names)!r} is there twice")
        tables = {table.name for table in self.tables}
        for i, placement in enumerate(self.plan.placements):
            where = f"manifest.plan.placements[{i}]"
            if placement.shard >= self.plan.num_shards:
                raise ValueError(
                    f"{where}.shard: is {placement.shard} of {self.plan.num_shards} shards"
                )
            if placement.table not in tables:
                raise ValueError(f"{where}.table: {placement.table!r} is not one of the tables")

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Read what `to_bytes` wrote.

        Raises:
            ValueError: this is not JSON in ASCII, has more values than a manifest may have, the format
                version is another, `from_json` refuses, or the signature is spelled in another way than
                `FORMAT.md` says.
        """
        data = read_ascii_json(content, "the manifest", MAX_MANIFEST_MARKS)
        _format_version(data)
        signed_message(content)
        return cls.from_json(data)


def _check_ranges(schema: InputSchema) -> None:
    ranges, dense = schema.dense_ranges, schema.dense_features
    if ranges and len(ranges) != len(dense):
        raise ValueError(
            f"manifest.schema.dense_ranges: has {len(ranges)} entries, expected {len(dense)}"
        )
    for place, (least, most) in enumerate((own.least, own.most) for own in ranges):
        good = least is most if least is None or most is None else least <= most
        if not good:
            raise ValueError(
                f"manifest.schema.dense_ranges[{place}]: is not a range from least to most"
            )


def _format_version(data: Any) -> int:
    """The version that a manifest says it has; refuses one that is not read here."""
    found = data.get("format_version") if isinstance(data, dict) else None
    if type(found) is int and OLDEST_FORMAT_VERSION <= found <= FORMAT_VERSION:
        return found
    shown = found if type(found) is int else "missing"
    raise ValueError(
        f"the package's format_version is {shown}, this tessera reads {OLDEST_FORMAT_VERSION} to "
        f"{FORMAT_VERSION}; package the model again, or load it with the tessera that wrote it"
    )
