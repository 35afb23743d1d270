"""What a user says of a module's inputs, and what the packager finds out by itself.

A module to be packaged takes some of these arguments, each at most once and in any order: a float
tensor ``[B, F]``, a `KeyedJaggedTensor` without weights and one with weights.  It returns a tensor,
a dictionary of tensors or a `KeyedTensor`, each tensor ``[B]`` or ``[B, k]``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from tessera.errors import UserError, refuse_unknown
from tessera.serving.package.schema import (
    DenseRange,
    FeatureSpec,
    Group,
    InputSchema,
    Keep,
    OtherColumn,
    OtherRole,
    OutOfRange,
    OutputSpec,
    Pooling,
)
from tessera.serving.packaging.collections.find import FoundTables
from tessera.serving.packaging.collections.hashing import UsedVocabulary
from tessera.training.modules.choices import Hashing
from tessera.training.modules.hashing import HashSpec
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

ArgumentKind = Literal["dense", "id_list", "id_score_list"]
Output = Tensor | dict[str, Tensor] | KeyedTensor

DEFAULT_OUTPUT = "default"
OUTPUT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@/-]*")


@dataclass(frozen=True, kw_only=True)
class FeatureRule:
    """How a feature's raw ids become rows; the rules of `tessera.serving.package.schema.FeatureSpec`.

    A feature whose ids the module hashes itself, by a `FeatureHasher`, needs no rule.

    Attributes:
        hashing: ``none``: the request's ids are rows; ``modulo`` or ``murmur3``: they are any
            64-bit numbers, which the package turns into rows.
        out_of_range: under ``none``, what becomes of an id that is not a row: ``reject`` refuses
            the request, ``clamp`` takes the nearest row, ``hash`` takes ``murmur3``'s row.
        rows: for a feature that goes to no embedding collection: ids lie in ``[0, rows)``, and
            a server refuses others.  None for the features of collections.

    Raises:
        UserError: a value that is none of these.
    """

    hashing: Hashing = "none"
    out_of_range: OutOfRange = "reject"
    rows: int | None = None

    def __post_init__(self) -> None:
        refuse_unknown("hashing", self.hashing, get_args(Hashing))
        refuse_unknown("out_of_range", self.out_of_range, get_args(OutOfRange))
        if self.rows is not None and (not isinstance(self.rows, int) or self.rows < 1):
            raise UserError(f"rows is {self.rows!r}; give a whole number of 1 or more, or None")


@dataclass(frozen=True, kw_only=True)
class RawColumn:
    """Where a row of raw values holds a feature, and how its values become ids.

    Clients that send whole rows read this; the fields are those of
    `tessera.serving.package.schema.FeatureSpec`.  Of a dense feature ``column`` alone counts.

    Attributes:
        column: the column of the row; empty: the feature's name.
        strings: whether its values are strings, whose ids are XXH64 of their UTF-8 bytes.
        hex: whether texts are numbers in 1 to 8 hexadecimal digits.
        separator: what stands between the values of a list that is a text; empty: lists are
            not texts.
        weights_column: for a feature with weights, the column that holds them; empty: the values
            are mappings of id to weight.
        many: whether a row may have several values; otherwise at most one.
        max_length: clients cut longer lists to this many ids; 0: they do not.
        keep: which ids of a longer list they keep.

    Raises:
        UserError: a value that cannot be meant.
    """

    column: str = ""
    strings: bool = False
    hex: bool = False
    separator: str = ""
    weights_column: str = ""
    many: bool = True
    max_length: int = 0
    keep: Keep = "first"

    def __post_init__(self) -> None:
        refuse_unknown("keep", self.keep, get_args(Keep))
        if self.strings and self.hex:
            raise UserError("strings and hex are both set; strings are hashed, or they are numbers")
        if self.max_length < 0:
            raise UserError(f"max_length is {self.max_length}; give 1 or more, or 0 for no limit")


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """What a module's inputs and output are called, and how its ids are treated.

    Attributes:
        dense_features: names of the dense columns; None: ``dense_0``, ``dense_1``, ...
        dense_missing: ``nan`` where the module knows what to do with NaN, else ``refuse``.
        features: by sparse feature, its rule; `FeatureRule()` for the others.
        columns: by feature, dense or sparse, its place in a row; `RawColumn()` for the others.
        ranges: by dense feature, what the training rows held of it; None: not known.
        other_columns: columns of the training data that are not inputs, by name, with what they
            are; clients leave them out.
        output: the name of the output of a module that returns a tensor; one that returns
            several names them itself.

    Raises:
        UserError: a name that is given twice, a rule that is not a `FeatureRule`, or a
            ``dense_missing`` that is neither.
    """

    dense_features: Sequence[str] | None = None
    dense_missing: Literal["nan", "refuse"] = "refuse"
    features: Mapping[str, FeatureRule] = field(default_factory=dict)
    columns: Mapping[str, RawColumn] = field(default_factory=dict)
    ranges: Mapping[str, DenseRange] | None = None
    other_columns: Mapping[str, OtherRole] = field(default_factory=dict)
    output: str = DEFAULT_OUTPUT

    def __post_init__(self) -> None:
        refuse_unknown("dense_missing", self.dense_missing, ("nan", "refuse"))
        names = list(self.dense_features or ())
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise UserError(f"dense_features has {twice[0]!r} twice; give each column its own name")
        for role in self.other_columns.values():
            refuse_unknown("other_columns", role, get_args(OtherRole))
        for name, rule in self.features.items():
            if not isinstance(rule, FeatureRule):
                raise UserError(
                    f"features[{name!r}] is {rule!r}; give a FeatureRule, such as "
                    "FeatureRule(hashing='murmur3')"
                )


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The sample batch of ``B`` samples, understood: each argument with its kind, in order."""

    kinds: tuple[ArgumentKind, ...]
    values: tuple[Tensor | KeyedJaggedTensor, ...]
    batch_size: int

    def of(self, kind: ArgumentKind) -> Tensor | KeyedJaggedTensor | None:
        """The argument of a kind, if there is one."""
        return next((v for k, v in zip(self.kinds, self.values, strict=True) if k == kind), None)

    def keys(self, group: Group) -> list[str]:
        """The features of a group, in the order of its lengths."""
        jagged = self.of(group)
        return list(jagged.keys()) if isinstance(jagged, KeyedJaggedTensor) else []


def read_inputs(schema: ModelInputs | None) -> ModelInputs:
    """What the user said of the inputs, or else the defaults; refuses anything else."""
    if schema is None:
        return ModelInputs()
    if not isinstance(schema, ModelInputs):
        raise UserError(f"schema is {_describe(schema)}; give a ModelInputs or None")
    return schema


def read_arguments(sample_batch: Sequence[Tensor | KeyedJaggedTensor]) -> Arguments:
    """Tell which argument is which; refuses what the module docstring does not allow."""
    if isinstance(sample_batch, Tensor | KeyedJaggedTensor):
        sample_batch = (sample_batch,)
    if not isinstance(sample_batch, Sequence):
        raise UserError(
            f"sample_batch is {_describe(sample_batch)}; give a tuple of the module's arguments"
        )
    kinds: list[ArgumentKind] = []
    sizes = []
    for place, value in enumerate(sample_batch):
        if isinstance(value, Tensor) and value.dim() == 2 and value.dtype == torch.float32:
            kinds.append("dense")
            sizes.append(value.shape[0])
        elif isinstance(value, KeyedJaggedTensor):
            kinds.append("id_list" if value.weights_or_none() is None else "id_score_list")
            sizes.append(value.stride())
        else:
            raise UserError(
                f"sample_batch[{place}] is {_describe(value)}; give a float32 tensor [B, F], a "
                "KeyedJaggedTensor, or a KeyedJaggedTensor with weights"
            )
    for kind in set(kinds):
        if kinds.count(kind) > 1:
            raise UserError(
                f"sample_batch has {kinds.count(kind)} arguments of kind {kind!r}; a request has "
                "one of each kind, so join them"
            )
    if len(set(sizes)) != 1 or sizes[0] < 1:
        raise UserError(f"sample_batch has arguments of {sizes} samples; give all the same, 1 up")
    return Arguments(kinds=tuple(kinds), values=tuple(sample_batch), batch_size=sizes[0])


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def named_outputs(output: Output, name: str) -> dict[str, Tensor]:
    """The tensors of a module's result by their names, traced results too; refuses other kinds."""
    if isinstance(output, KeyedTensor):
        return output.to_dict()
    if isinstance(output, dict):
        return output
    if isinstance(output, tuple | list):
        raise UserError(
            f"the module returns a {type(output).__name__}; return a dictionary, whose keys name "
            "the outputs"
        )
    return {name: output}


def output_specs(outputs: Mapping[str, Tensor], batch_size: int) -> tuple[OutputSpec, ...]:
    """The widths of outputs ``[B]`` or ``[B, k]`` with simple names; refuses others."""
    specs = []
    for name, value in outputs.items():
        if not isinstance(name, str) or not OUTPUT_NAME.fullmatch(name):
            raise UserError(
                f"the output {name!r} needs another name: letters, digits and ._@/-, beginning "
                "with a letter or digit"
            )
        shape = list(value.shape) if isinstance(value, Tensor) else None
        if shape is None or len(shape) not in {1, 2} or shape[0] != batch_size:
            found = type(value).__name__ if shape is None else f"of shape {shape}"
            raise UserError(
                f"output {name!r} is {found} for {batch_size} samples; return a tensor [B] or "
                "[B, k] per output"
            )
        specs.append(OutputSpec(name=name, width=1 if len(shape) == 1 else shape[1]))
    if not specs:
        raise UserError("the module returns no outputs; return a tensor or a dictionary of them")
    return tuple(specs)


def module_schema(
    inputs: ModelInputs,
    arguments: Arguments,
    found: FoundTables,
    hash_specs: Mapping[str, HashSpec],
    outputs: tuple[OutputSpec, ...],
) -> InputSchema:
    """The package's schema; ``hash_specs`` says what the module's own `FeatureHasher` does.

    Raises:
        UserError: names that do not fit the sample batch, or a feature that needs a rule.
    """
    plain, scored = arguments.keys("id_list"), arguments.keys("id_score_list")
    both = sorted(set(plain) & set(scored))
    if both:
        raise UserError(
            f"feature {both[0]!r} comes with and without weights; give one another name"
        )
    unknown = sorted(set(inputs.features) - {*plain, *scored})
    if unknown:
        raise UserError(
            f"features names {unknown[0]!r}, which the sample batch has not; it has "
            f"{', '.join([*plain, *scored])}"
        )
    groups: dict[str, Group] = {
        **dict.fromkeys(plain, "id_list"),
        **dict.fromkeys(scored, "id_score_list"),
    }
    dense = _dense_names(inputs, arguments)
    unknown = sorted(set(inputs.columns) - {*dense, *plain, *scored})
    if unknown:
        raise UserError(
            f"columns names {unknown[0]!r}, which is not a feature of the sample batch; it has "
            f"{', '.join([*dense, *plain, *scored])}"
        )
    return InputSchema(
        dense_features=dense,
        dense_missing=inputs.dense_missing,
        dense_ranges=_dense_ranges(inputs, dense),
        other_columns=tuple(
            OtherColumn(name=name, role=role) for name, role in inputs.other_columns.items()
        ),
        dense_columns=tuple(inputs.columns.get(name, RawColumn()).column for name in dense),
        features=tuple(
            _feature(name, group, inputs, found, hash_specs.get(name))
            for name, group in groups.items()
        ),
        outputs=outputs,
    )


def with_vocabularies(schema: InputSchema, features: Mapping[str, UsedVocabulary]) -> InputSchema:
    """The schema of a module that looks the ids of ``features`` up in vocabularies of its own.

    Their ``rows`` follow the vocabulary, since a server counts by them which ids it holds.
    """
    told = (
        replace(feature, hashing="vocabulary", vocabulary=used.number, rows=used.ids + 1)
        if (used := features.get(feature.name)) is not None
        else feature
        for feature in schema.features
    )
    return replace(schema, features=tuple(told))


def with_mapped(
    schema: InputSchema, features: Collection[str], rules: Collection[str]
) -> InputSchema:
    """The schema of a module that maps the ids of ``features`` to rows itself; ``rules`` are those that have one.

    Raises:
        UserError: one of them has a rule for its ids.
    """
    if twice := sorted({*features} & {*rules}):
        raise UserError(
            f"features[{twice[0]!r}] has a rule, but the module's own managed collision module maps its "
            "ids; leave the rule out"
        )
    told = (
        replace(feature, hashing="vocabulary") if feature.name in features else feature
        for feature in schema.features
    )
    return replace(schema, features=tuple(told))


def _dense_names(inputs: ModelInputs, arguments: Arguments) -> tuple[str, ...]:
    dense = arguments.of("dense")
    columns = dense.shape[1] if isinstance(dense, Tensor) else 0
    if inputs.dense_features is None:
        return tuple(f"dense_{column}" for column in range(columns))
    if len(inputs.dense_features) != columns:
        raise UserError(
            f"dense_features has {len(inputs.dense_features)} names, the sample batch {columns} "
            "columns; give one name per column"
        )
    return tuple(inputs.dense_features)


def _dense_ranges(inputs: ModelInputs, dense: Sequence[str]) -> tuple[DenseRange, ...]:
    if inputs.ranges is None:
        return ()
    wrong = set(inputs.ranges) ^ set(dense)
    if wrong:
        raise UserError(
            f"ranges and dense features differ in {min(wrong)!r}; give a DenseRange for each of "
            f"{', '.join(dense)}"
        )
    return tuple(inputs.ranges[name] for name in dense)


def _feature(
    name: str,
    group: Group,
    inputs: ModelInputs,
    found: FoundTables,
    hashed: HashSpec | None,
) -> FeatureSpec:
    rule = inputs.features.get(name, FeatureRule())
    tables = [
        table
        for collection in found.collections
        for table in collection.tables
        if name in table.config.feature_names
    ]
    if tables and rule.rows is not None:
        raise UserError(
            f"features[{name!r}] gives rows={rule.rows}, but its table has "
            f"{tables[0].config.num_embeddings}; leave rows out"
        )
    if hashed is not None:
        if name in inputs.features:
            raise UserError(
                f"features[{name!r}] has a rule, but the module's own FeatureHasher hashes its ids; "
                "leave the rule out"
            )
        rule = FeatureRule(hashing=hashed.hashing, out_of_range=hashed.out_of_range)
    if tables:
        smallest = min(tables, key=lambda table: table.config.num_embeddings)
        table, rows = smallest.stored, smallest.config.num_embeddings
        dim = smallest.config.embedding_dim
        pooling: Pooling = smallest.pooling
    else:
        known = rule.rows if hashed is None else hashed.rows
        if known is None or (hashed is None and rule != FeatureRule(rows=known)):
            raise UserError(
                f"feature {name!r} goes to no embedding collection; say how many ids it has, "
                f"features={{{name!r}: FeatureRule(rows=...)}}, and nothing else: its ids reach "
                "the module as they are"
            )
        table, rows, dim, pooling = "", known, 1, "none"
    return FeatureSpec(
        name=name,
        group=group,
        table=table,
        rows=rows,
        dim=dim,
        pooling=pooling,
        hashing=rule.hashing,
        out_of_range=rule.out_of_range,
        **vars(inputs.columns.get(name, RawColumn())),
    )
