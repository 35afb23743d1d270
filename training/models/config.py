"""The description of a ranking model: what a training config says under ``model:``.

`ModelConfig` holds what every architecture has: the features and their tables.  Each
architecture adds fields of its own in a module of `tessera.training.models.architectures`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tessera.errors import UserError
from tessera.training import field_checks as check
from tessera.training.modules.choices import DenseMissing, Hashing, OutOfRange, Pooling
from tessera.training.variants import Variants

if TYPE_CHECKING:
    from torch import nn

    from tessera.training.models.inputs import ModelInputs


_MIXED = "dlrm_dcn, mmoe, ple, din, sasrec and two_tower"
"""The architectures whose tables may have different dimensions."""

MAX_AUTO_DIM = 64
"""The most columns that ``auto`` gives a table."""


def auto_dim(rows: int) -> int:
    """The embedding dimension that ``auto`` stands for, of a table that has ``rows`` rows.

    It is ``6 * rows ** (1 / 4)``, the rule of Wang et al., "Deep & Cross Network for Ad Click
    Predictions" (2017), section 4, rounded up to a multiple of 4, `MAX_AUTO_DIM` at most.
    """
    return min(MAX_AUTO_DIM, 4 * math.ceil(6 * math.sqrt(math.sqrt(rows)) / 4))


def _check_dim(section: TableConfig | ModelConfig, name: str) -> None:
    value = getattr(section, name)
    if isinstance(value, str):
        check.allowed(section, name, lambda word: word == "auto", "give a number or auto")
    else:
        check.at_least_one(section, name)


def _check_lookup(section: TableConfig | ModelConfig) -> None:
    """Check what the defaults of all lookups and one lookup's own settings have in common."""
    check.at_least_one(section, "rows")
    check.one_of(section, "pooling", Pooling)
    check.one_of(section, "hashing", Hashing)
    check.one_of(section, "out_of_range", OutOfRange)


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """What one feature's lookup has of its own; None takes the model's default.

    Attributes:
        rows (rows): the table's number of rows.
        dim (columns): the embedding dimension (some architectures need the same for all features); ``auto``:
            what `auto_dim` says of the table's rows, or of its vocabulary's size.
        pooling: how the vectors of one bag become one.
        hashing: how a raw id becomes a row.
        out_of_range: under ``hashing: none``, what becomes of an id outside the table.
        table: the table's name; features that give the same name share the table.
        weighted: whether each id comes with a weight that multiplies its vector.
    """

    rows: int | None = None
    dim: int | Literal["auto"] | None = None
    pooling: Pooling | None = None
    hashing: Hashing | None = None
    out_of_range: OutOfRange | None = None
    table: str | None = None
    weighted: bool = False

    def __post_init__(self) -> None:
        _check_lookup(self)
        _check_dim(self, "dim")
        if self.table is not None and (not self.table or "." in self.table):
            raise UserError(f"table is {self.table!r}; give a name without a dot")


@dataclass(frozen=True, kw_only=True)
class RetrievalSettings:
    """How a model for retrieval is trained; see `TwoTowerConfig` for the fields."""

    sampled_negatives: int
    popularity_correction: bool


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A ranking model: its features, its tables, and its architecture.

    ``ModelConfig(arch="dlrm_dcn", ...)`` makes the subclass that is registered under that name,
    and ``ModelConfig(factory="pkg.module:function", ...)`` the one for modules of the user's.

    Attributes:
        arch: the architecture's name.
        embedding_dim (columns): columns of the tables; ``auto`` of each as its rows say, see `auto_dim`.
        rows (rows): rows of a table that ``tables`` does not name.
        pooling: pooling of a table that ``tables`` does not name.
        hashing: hashing rule of a table that ``tables`` does not name.
        out_of_range: what becomes of ids outside a table that ``tables`` does not name.
        tables: per feature, what differs from the defaults.
        dense_missing: a missing (NaN) dense value becomes 0, with a 0/1 column that tells
            (``indicator``) or without (``zero``).
        embedding_init: tables begin uniform in plus and minus this; None: ``sqrt(1 / rows)``.

    Raises:
        UserError: naming field, value and remedy.
    """

    variants: ClassVar[Variants] = Variants(
        "arch",
        default="dlrm",
        implied={"factory": "custom"},
        package="tessera.training.models.architectures",
    )
    scores: ClassVar[Literal["logits", "raw"]] = "logits"
    """What a binary label's outputs are: ``logits`` are served as probabilities, ``raw`` as they are."""

    arch: str = "dlrm"
    embedding_dim: int | Literal["auto"] = 16
    rows: int = 100_000
    pooling: Pooling = "sum"
    hashing: Hashing = "murmur3"
    out_of_range: OutOfRange = "clamp"
    tables: dict[str, TableConfig] = field(default_factory=dict)
    dense_missing: DenseMissing = "indicator"
    embedding_init: float | None = None

    def __new__(cls, **fields: Any) -> ModelConfig:  # noqa: PYI034 - of a subclass
        """An instance of the architecture that the fields name, as `pathlib.Path` does it."""
        if cls is ModelConfig:
            cls = cls.variants.find(cls.variants.chosen(fields))  # noqa: PLW0642 - the subclass
        return object.__new__(cls)

    def __post_init__(self) -> None:
        _check_lookup(self)
        check.one_of(self, "dense_missing", DenseMissing)
        _check_dim(self, "embedding_dim")
        check.not_negative(self, "embedding_init")

    def build(self, inputs: ModelInputs) -> nn.Module:
        """The architecture with fresh weights.

        Args:
            inputs: what it is given, and the tables of its features.

        Returns:
            A module that takes ``[B, inputs.dense_columns]`` float32 and the features' rows as a
            `KeyedJaggedTensor`, and returns logits ``[B, len(inputs.labels)]`` float32.

        Raises:
            UserError: the config does not fit the features.
        """
        raise NotImplementedError

    def logit_layers(self) -> tuple[str, ...]:
        """Dotted names, within what `build` returns, of the ``nn.Linear`` that make the logits.

        The trainer begins their biases at the log-odds of the labels (of a label of the task
        regression: at its mean).  A layer has one output per label; or its name holds a ``*``, which
        stands for the label's number, from 0, and there is a layer with one output for each.
        """
        raise NotImplementedError

    def retrieval(self) -> RetrievalSettings | None:
        """How it is trained for retrieval; None: by the losses of its labels.

        What `build` returns is then a `tessera.training.models.retrieval.RetrievalArch`.
        """
        return None

    def require_one_dim(self) -> None:
        """Check that no feature has an embedding dimension of its own.

        Raises:
            UserError: one has, or they all may have.
        """
        if self.embedding_dim == "auto":
            raise UserError(
                f"embedding_dim is auto; arch {self.arch} needs one size, {_MIXED} take mixed ones"
            )
        for feature, own in self.tables.items():
            if own.dim not in {None, self.embedding_dim}:
                raise UserError(
                    f"tables.{feature}.dim is {own.dim} but embedding_dim is "
                    f"{self.embedding_dim}; arch {self.arch} needs one size, {_MIXED} take mixed "
                    "ones"
                )


@dataclass(frozen=True, kw_only=True)
class DeepModelConfig(ModelConfig):
    """What keeps the architectures here from learning rows by heart; not an architecture by itself.

    Attributes:
        dropout (share): share of the outputs of hidden layers, behind the bottom MLP, that training sets to
            zero.
        embedding_dropout (share): share of the numbers of looked-up vectors that training sets to zero.
        batch_norm: whether the outputs of these hidden layers are normalised over the batch, of all
            ranks together, before their activation.
    """

    dropout: float = 0.0
    embedding_dropout: float = 0.0
    batch_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check.share(self, "dropout embedding_dropout")


@dataclass(frozen=True, kw_only=True)
class MLPModelConfig(DeepModelConfig):
    """What architectures with a bottom and a top MLP share; not an architecture by itself.

    Attributes:
        dense_layers: hidden layers of the bottom MLP; its last layer, of ``embedding_dim`` (where
            that is ``auto``, of the widest table's dimension), is added.
        over_layers: hidden layers of the top MLP; its last layer, the logit, is added.
    """

    dense_layers: tuple[int, ...] = (128, 64)
    over_layers: tuple[int, ...] = (128, 64)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least_one(self, "dense_layers over_layers")
        if not self.over_layers:
            raise UserError("over_layers is empty; give at least one hidden layer")

    def dense_sizes(self, inputs: ModelInputs) -> list[int]:
        """The columns after each layer of the bottom MLP."""
        if self.embedding_dim == "auto":
            return [*self.dense_layers, max(feature.dim for feature in inputs.features)]
        return [*self.dense_layers, self.embedding_dim]

    def logit_layers(self) -> tuple[str, ...]:
        """The last layer of `tessera.training.models.dlrm.OverArch`."""
        return ("over_arch.model.1",)


architecture = ModelConfig.variants.add
"""Registers a subclass of `ModelConfig` under the default of its field ``arch``."""
