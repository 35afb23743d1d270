"""The description of a served model's inputs and outputs.

One `InputSchema` is written into the package's manifest by the packager and read by the
servers (to check requests), by the clients (to build them) and by the load generators (to draw
them).  Shapes: ``B`` samples, ``F`` features of a group, ``N`` ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tessera.serving.package.fields import Between, Positive

Group = Literal["id_list", "id_score_list"]
Hashing = Literal["none", "modulo", "murmur3"]
OutOfRange = Literal["reject", "clamp", "hash"]
MAX_WIDTH = 1 << 20
"""The widest output: a server could not hold more of a batch."""

Pooling = Literal["sum", "mean", "none"]


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """One sparse feature and the table that it looks up.

    Attributes:
        name: the feature's name, unique in the schema.
        group: ``id_list`` (ids) or ``id_score_list`` (ids with a float32 weight each).
        table: the table's name; several features may share one.  A feature that several tables
            serve names the one with the fewest rows, one that goes to no table an empty name.
        rows: the table's number of rows; where there is no table, the number of ids.
        dim: the embedding dimension; 1 where there is no table.
        pooling: how the vectors of one bag become one vector; ``none``: they stay as they are.
        hashing: how a raw 64-bit id becomes a row, inside the scripted graph.  ``none``: the
            id is the row.
        out_of_range: what happens under ``hashing="none"`` to an id outside ``[0, rows)``:
            ``reject`` refuses the request, ``clamp`` takes the nearest row, ``hash`` takes
            ``murmur3(id) mod rows``; the latter two are served and counted.  Without effect
            under the other two hashing rules, whose rows are always in range.
    """

    name: str
    group: Group
    table: str
    rows: Positive
    dim: Positive
    pooling: Pooling
    hashing: Hashing
    out_of_range: OutOfRange


@dataclass(frozen=True, kw_only=True)
class OutputSpec:
    """One output: ``[B]`` when ``width`` is 1, else ``[B, width]``, float32."""

    name: str
    width: Annotated[int, Between(1, MAX_WIDTH)]


@dataclass(frozen=True, kw_only=True)
class InputSchema:
    """What a model takes and gives.

    Attributes:
        dense_features: names of the float features, in their column order.  A missing value
            is sent as NaN where ``dense_missing`` is ``"nan"``; where it is ``"refuse"`` a NaN
            makes the request invalid.
        dense_missing: see above.
        dense_transform: what training applied to the raw values, for the client's author;
            the server takes values that are already transformed.
        features: the sparse features; those of one group, in this order, are the rows of that
            group's lengths.
        outputs: the model's outputs.
    """

    dense_features: tuple[str, ...]
    dense_missing: Literal["nan", "refuse"]
    dense_transform: str
    features: tuple[FeatureSpec, ...]
    outputs: tuple[OutputSpec, ...]

    def group(self, group: Group) -> tuple[FeatureSpec, ...]:
        """The features of ``group``, in the order of that group's lengths."""
        return tuple(feature for feature in self.features if feature.group == group)

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable form; `from_json` is its inverse."""
        return {
            "dense_features": list(self.dense_features),
            "dense_missing": self.dense_missing,
            "dense_transform": self.dense_transform,
            "features": [dict(vars(feature)) for feature in self.features],
            "outputs": [dict(vars(output)) for output in self.outputs],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> InputSchema:
        """Read what `to_json` wrote.

        Raises:
            ValueError: a key is missing or unknown.
        """
        try:
            return cls(
                dense_features=tuple(data["dense_features"]),
                dense_missing=data["dense_missing"],
                dense_transform=data["dense_transform"],
                features=tuple(FeatureSpec(**feature) for feature in data["features"]),
                outputs=tuple(OutputSpec(**output) for output in data["outputs"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"the input schema cannot be read: {error}") from error
