"""The description of a ranking model: what a training config says under ``model:``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tessera.errors import UserError

Arch = Literal["dlrm", "dlrm_dcn"]
DenseMissing = Literal["indicator", "zero"]
Hashing = Literal["none", "modulo", "murmur3"]
OutOfRange = Literal["reject", "clamp", "hash"]
Pooling = Literal["sum", "mean"]


def _choice(name: str, value: str | None, allowed: Any) -> None:
    if value is not None and value not in get_args(allowed):
        raise UserError(f"{name} is {value!r}; give one of {', '.join(get_args(allowed))}")


def _positive(name: str, values: Iterable[int | None]) -> None:
    for value in values:
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; give a number of at least 1")


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """What one feature's lookup has of its own; None takes the model's default.

    Attributes:
        rows: the table's number of rows.
        dim: the embedding dimension (``dlrm`` needs the same for all features).
        pooling: how the vectors of one bag become one.
        hashing: how a raw id becomes a row.
        out_of_range: under ``hashing: none``, what becomes of an id outside the table.
        table: the table's name; features that give the same name share the table.
        weighted: whether each id comes with a weight that multiplies its vector.
    """

    rows: int | None = None
    dim: int | None = None
    pooling: Pooling | None = None
    hashing: Hashing | None = None
    out_of_range: OutOfRange | None = None
    table: str | None = None
    weighted: bool = False

    def __post_init__(self) -> None:
        _positive("rows", [self.rows])
        _positive("dim", [self.dim])
        _choice("pooling", self.pooling, Pooling)
        _choice("hashing", self.hashing, Hashing)
        _choice("out_of_range", self.out_of_range, OutOfRange)
        if self.table is not None and (not self.table or "." in self.table):
            raise UserError(f"table is {self.table!r}; give a name without a dot")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A ranking model.

    Attributes:
        arch: ``dlrm`` (dot interaction) or ``dlrm_dcn`` (low-rank cross network).
        embedding_dim: columns of the tables.
        dense_layers: hidden layers of the bottom MLP; its last layer, of ``embedding_dim``, is
            added.
        over_layers: hidden layers of the top MLP; its last layer, the logit, is added.
        dcn_num_layers: layers of the cross network (``dlrm_dcn`` only).
        dcn_low_rank_dim: rank of its matrices (``dlrm_dcn`` only).
        rows: rows of a table that ``tables`` does not name.
        pooling: likewise.
        hashing: likewise.
        out_of_range: likewise.
        tables: per feature, what differs from the defaults.
        dense_missing: a missing (NaN) dense value becomes 0, with a 0/1 column that tells
            (``indicator``) or without (``zero``).
        dropout: share of the top MLP's hidden outputs that training sets to zero.
        embedding_init: tables begin uniform in plus and minus this; None: ``sqrt(1 / rows)``.

    Raises:
        UserError: naming field, value and remedy.
    """

    arch: Arch = "dlrm"
    embedding_dim: int = 16
    dense_layers: tuple[int, ...] = (128, 64)
    over_layers: tuple[int, ...] = (128, 64)
    dcn_num_layers: int = 3
    dcn_low_rank_dim: int = 64
    rows: int = 100_000
    pooling: Pooling = "sum"
    hashing: Hashing = "murmur3"
    out_of_range: OutOfRange = "clamp"
    tables: dict[str, TableConfig] = field(default_factory=dict)
    dense_missing: DenseMissing = "indicator"
    dropout: float = 0.0
    embedding_init: float | None = None

    def __post_init__(self) -> None:
        _choice("arch", self.arch, Arch)
        _choice("pooling", self.pooling, Pooling)
        _choice("hashing", self.hashing, Hashing)
        _choice("out_of_range", self.out_of_range, OutOfRange)
        _choice("dense_missing", self.dense_missing, DenseMissing)
        _positive("embedding_dim", [self.embedding_dim])
        _positive("dense_layers", self.dense_layers)
        _positive("over_layers", self.over_layers)
        _positive("dcn_num_layers", [self.dcn_num_layers])
        _positive("dcn_low_rank_dim", [self.dcn_low_rank_dim])
        _positive("rows", [self.rows])
        if not self.over_layers:
            raise UserError("over_layers is empty; give at least one hidden layer")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout is {self.dropout}; give a share from 0 to below 1")
        if self.embedding_init is not None and self.embedding_init < 0:
            raise UserError(f"embedding_init is {self.embedding_init}; give 0 or more")
        self._check_tables()

    def _check_tables(self) -> None:
        for feature, own in self.tables.items():
            if self.arch == "dlrm" and own.dim not in {None, self.embedding_dim}:
                raise UserError(
                    f"tables.{feature}.dim is {own.dim} but embedding_dim is "
                    f"{self.embedding_dim}; arch dlrm needs one size, dlrm_dcn takes mixed ones"
                )
