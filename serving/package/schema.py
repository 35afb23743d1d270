"""The description of a served model's inputs and outputs.

One `InputSchema` is written into the package's manifest by the packager and read by the
servers (to check requests), by the clients (to build them) and by the load generators (to draw
them).  Shapes: ``B`` samples, ``F`` features of a group, ``N`` ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tessera.serving.package.fields import Between, Count, Positive

RAW_SINCE = 4
"""The version of the package's format from which on a model takes raw values."""

RANGES_SINCE = 5
"""The version from which on the manifest says what the training rows held."""

_RAW = {"since": RAW_SINCE}
_RANGES = {"since": RANGES_SINCE}

Group = Literal["id_list", "id_score_list"]
Hashing = Literal["none", "modulo", "murmur3", "vocabulary"]
OutOfRange = Literal["reject", "clamp", "hash"]
Keep = Literal["first", "last"]
StringHash = Literal["xxh64"]
OtherRole = Literal["label", "weight", "timestamp", "group", "ignore"]
FLOAT32_MAX = 3.4028234663852886e38
Float32 = Annotated[float, Between(-FLOAT32_MAX, FLOAT32_MAX)]
MAX_WIDTH = 1 << 20
"""The widest output: a server could not hold more of a batch."""

Pooling = Literal["sum", "mean", "none"]


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """One sparse feature and the table that it looks up.

    Attributes:
        name: the feature's name, unique in the schema.
        group: ``id_list`` (ids) or ``id_score_list`` (ids with a float32 weight each).
        strings: whether the raw values are strings, whose ids are `InputSchema.string_hash` of their
            UTF-8 bytes; otherwise they are the ids.
        hex: where the ids are numbers: whether a value that is a text has them in hexadecimal
            digits, 1 to 8, as Criteo's categories do; otherwise in decimal ones.
        column: the column of a row that holds the raw values; empty: the feature's name.
        weights_column: the column that holds a weight for each of them; empty: the values and
            weights are in one column, as a mapping, or there are no weights.
        separator: what stood between the values of a list that was a text in training; empty:
            lists were not texts, or that is not known.
        many: whether a row may have several values; otherwise at most one.
        max_length: the most ids of a sample in training, which cut longer lists; 0: no limit.
        keep: which ids of a longer list training kept.
        table: the table's name; several features may share one.  A feature that several tables
            serve names the one with the fewest rows, one that goes to no table an empty name.
        rows: the table's number of rows; where there is no table, the number of ids.
        dim: the embedding dimension; 1 where there is no table.
        pooling: how the vectors of one bag become one vector; ``none``: they stay as they are.
        hashing: how a raw 64-bit id becomes a row, inside the scripted graph.  ``none``: the
            id is the row.  ``vocabulary``: the graph knows the ids that have rows, and gives every
            other id one row that those share: row 0 where ``vocabulary`` has a number.
        vocabulary: under ``hashing="vocabulary"``, the number of its vocabulary in the model's
            buffers (`FORMAT.md`, "Vocabularies"); null where its map is a managed collision
            module's, and elsewhere.
        out_of_range: what happens under ``hashing="none"`` to an id outside ``[0, rows)``:
            ``reject`` refuses the request, ``clamp`` takes the nearest row, ``hash`` takes
            ``murmur3(id) mod rows``; the latter two are served and counted.  Without effect
            under the other hashing rules, whose rows are always in range.
    """

    name: str
    group: Group
    strings: bool = field(default=False, metadata=_RAW)
    hex: bool = field(default=False, metadata=_RANGES)
    column: str = field(default="", metadata=_RAW)
    weights_column: str = field(default="", metadata=_RAW)
    separator: str = field(default="", metadata=_RANGES)
    many: bool = field(default=True, metadata=_RAW)
    max_length: Count = field(default=0, metadata=_RAW)
    keep: Keep = field(default="first", metadata=_RAW)
    table: str
    rows: Positive
    dim: Positive
    pooling: Pooling
    hashing: Hashing
    vocabulary: Count | None = field(default=None, metadata=_RANGES)
    out_of_range: OutOfRange


@dataclass(frozen=True, kw_only=True)
class OutputSpec:
    """One output: ``[B]`` when ``width`` is 1, else ``[B, width]``, float32."""

    name: str
    width: Annotated[int, Between(1, MAX_WIDTH)]


@dataclass(frozen=True, kw_only=True)
class DenseRange:
    """What the training rows held of a dense feature, before any transform.

    Attributes:
        least: the smallest finite value; null where no row had one.
        most: the largest finite value; null likewise.
        missing: the share of rows without a value.
    """

    least: Float32 | None
    most: Float32 | None
    missing: Annotated[float, Between(0, 1)]


@dataclass(frozen=True, kw_only=True)
class OtherColumn:
    """A column of the training data that the model does not take, by its name in the data."""

    name: str
    role: OtherRole


@dataclass(frozen=True, kw_only=True)
class InputSchema:
    """What a model takes and gives.

    Attributes:
        dense_features: names of the float features, in their column order.  A missing value
            is sent as NaN where ``dense_missing`` is ``"nan"``; where it is ``"refuse"`` a NaN
            makes the request invalid.
        dense_missing: see above.
        dense_transform: up to version 3, whose models take values that are already transformed: what
            training applied to the raw ones, in words.
        dense_columns: by dense feature, the column of a row that holds its raw value; empty: the
            feature's name.
        dense_ranges: by dense feature, what the training rows held of it; empty: that is not
            known.  Servers count the values outside.
        other_columns: the columns of the training data that are not inputs; clients leave them out.
        string_hash: how strings become ids; `tessera.kernels.string_ids` is that function.
        features: the sparse features; those of one group, in this order, are the rows of that
            group's lengths.
        outputs: the model's outputs.
    """

    dense_features: tuple[str, ...]
    dense_missing: Literal["nan", "refuse"]
    dense_transform: str = field(default="", metadata={"until": RAW_SINCE - 1})
    dense_columns: tuple[str, ...] = field(default=(), metadata=_RAW)
    dense_ranges: tuple[DenseRange, ...] = field(default=(), metadata=_RANGES)
    other_columns: tuple[OtherColumn, ...] = field(default=(), metadata=_RANGES)
    string_hash: StringHash = field(default="xxh64", metadata=_RAW)
    features: tuple[FeatureSpec, ...]
    outputs: tuple[OutputSpec, ...]

    def group(self, group: Group) -> tuple[FeatureSpec, ...]:
        """The features of ``group``, in the order of that group's lengths."""
        return tuple(feature for feature in self.features if feature.group == group)
