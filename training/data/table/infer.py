"""What each column of a table seems to be, and why."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tessera.errors import UserError
from tessera.training.data.columns import LIST_KINDS, ColumnConfig, Side
from tessera.training.data.string_columns import is_string_type
from tessera.training.data.table.common import missing_column
from tessera.training.data.table.sample import Sample
from tessera.training.data.table.settle import is_list
from tessera.training.data.table.shown import examples, is_number, seen

LABEL = re.compile(
    r"(is_?)?(label|labels|target|y|click|clicked|clicks?|purchase|purchased|bought|buy|order(ed)?"
    r"|convert(ed)?|conversion|like|liked|install(ed)?|subscribed|watched|response)"
)
TIME = re.compile(r"(.*_)?(timestamp|time|ts|date|datetime|day|created(_at)?|at)")
WEIGHT = re.compile(r"(sample_?|row_?)?weight")
ID = re.compile(r"(.*_)?(id|ids|uid|code|zip|zipcode|category|type|class|group|segment)")
SEQUENCE = re.compile(r".*(hist|seq|last|recent|previous|past|viewed|session).*")
WEIGHTS_OF = ("_weights", "_weight", "_w", "_scores", "_score")
SIDES: Mapping[Side, re.Pattern[str]] = {
    "user": re.compile(r"(user|customer|member|visitor|uid|age$|gender$|occupation$).*"),
    "item": re.compile(r"(item|product|article|movie|ad_|ad$|doc|creative|price$|brand$|genre).*"),
    "context": re.compile(r"(device|hour|page|position|placement|os$|browser|weekday).*"),
}

FEW_IDS = 20
"""An integer column with no more values than this is one of ids."""
VOCABULARY_IDS = 10_000
MIN_ROWS_FOR_IDENTIFIER = 200
TEXT_LENGTH = 40
LONG_LIST = 50
SKEWED = 10.0
"""Where the largest values are this many times the typical one, a logarithm comes first."""


@dataclass(frozen=True, kw_only=True)
class Inferred:
    """One column.

    Attributes:
        name: its name in the files.
        type: its type, as it was read.
        missing: share of rows without a value, in [0, 1].
        distinct: different values (of lists: items) in the sample.
        seen: ranges or lengths, in words.
        examples: some values.
        config: what it seems to be.
        why: the reason, in words.
    """

    name: str
    type: str
    missing: float
    distinct: int
    seen: str
    examples: str
    config: ColumnConfig
    why: str


def infer(sample: Sample, labels: list[str]) -> list[Inferred]:
    """What the columns of ``sample`` seem to be.

    Args:
        sample: some rows.
        labels: the names of the labels, where the user said them; empty: found by name and type.

    Raises:
        UserError: there is no such column, or none that looks like a label.
    """
    table = sample.table
    for name in labels:
        if name not in table.column_names:
            raise UserError(f"--label {missing_column(_HERE, name, table.column_names)}")
    labels = labels or [name for name in table.column_names if _is_label(name, table.column(name))]
    if not labels:
        raise UserError(
            "no column looks like a label (such as click, target or purchase, of 0 and 1); say which"
            f" with --label NAME; the columns are {', '.join(table.column_names[:30])}"
        )
    found = [_inferred(name, sample, labels) for name in table.column_names]
    found = _one_of_each(found)
    return _with_shared_tables(_with_weights(found, table), table)


_HERE: Any = "NAME"


def _is_label(name: str, column: Any) -> bool:
    if not LABEL.fullmatch(name.lower()) or not is_number(column.type):
        return False
    return bool(set(_distinct_numbers(column, 3)) <= {0.0, 1.0})


def _distinct_numbers(column: Any, most: int) -> list[float]:
    return [float(value) for value in pc.unique(column.drop_null())[:most].to_pylist()]


def _inferred(name: str, sample: Sample, labels: list[str]) -> Inferred:
    column = sample.table.column(name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    known = column.drop_null()
    items = _items(known)
    distinct = _count_distinct(items)
    config, why = _choice(
        _Facts(name=name, known=known, items=items, distinct=distinct, labels=labels)
    )
    if sample.text and (config.kind == "categorical" or config.kind in LIST_KINDS):
        config = dataclasses.replace(config, strings=is_string_type(items.type))
    if config.kind in LIST_KINDS and name in sample.separators:
        config = dataclasses.replace(config, separator=sample.separators[name])
    return Inferred(
        name=name,
        type=str(column.type)[:40],
        missing=1 - len(known) / max(1, len(column)),
        distinct=distinct,
        seen=seen(known, items),
        examples=examples(known),
        config=config,
        why=why,
    )


def _items(known: Any) -> Any:
    if pa.types.is_map(known.type):
        return known.keys
    return pc.list_flatten(known) if is_list(known.type) else known


def _count_distinct(items: Any) -> int:
    try:
        return int(pc.count_distinct(items).as_py())
    except pa.ArrowException:  # a type that has no equality
        return len(items)


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What the rules look at: a column's values without the missing ones."""

    name: str
    known: Any
    items: Any
    distinct: int
    labels: list[str]

    @property
    def lower(self) -> str:
        return self.name.lower()

    @property
    def type(self) -> Any:
        return self.known.type

    @property
    def side(self) -> Side | None:
        return next((side for side, pattern in SIDES.items() if pattern.match(self.lower)), None)

    @property
    def differs_by_row(self) -> bool:
        """Whether nearly every row has a value of its own."""
        rows = len(self.known)
        return self.distinct > 0.95 * rows and rows >= MIN_ROWS_FOR_IDENTIFIER

    @property
    def id_rule(self) -> tuple[Any, ...]:
        few = self.distinct <= VOCABULARY_IDS
        return ({"vocabulary": {"min_count": 2}},) if few else ()


_Choice = tuple[ColumnConfig, str]


def _ignored(why: str) -> _Choice:
    return ColumnConfig(kind="ignore"), why


def _label(facts: _Facts) -> _Choice | None:
    if facts.name not in facts.labels:
        if _is_label(facts.name, facts.known):
            return _ignored("it looks like another label, which nobody knows beforehand")
        return None
    if not is_number(facts.type):
        raise UserError(
            f"--label {facts.name}: the column has the type {facts.type}; a label is a number, such"
            " as 0 or 1"
        )
    if set(_distinct_numbers(facts.known, 3)) <= {0.0, 1.0}:
        return ColumnConfig(kind="label", task="binary"), "a label of 0 and 1"
    return ColumnConfig(kind="label", task="regression"), "a label of numbers"


def _without_values(facts: _Facts) -> _Choice | None:
    return None if len(facts.known) else _ignored("it has no values")


def _map(facts: _Facts) -> _Choice | None:
    if not pa.types.is_map(facts.type):
        return None
    if not is_number(facts.type.item_type):
        return _ignored("a map whose values are not numbers")
    return ColumnConfig(kind="weighted_list", side=facts.side), "a map of ids to weights"


def _list(facts: _Facts) -> _Choice | None:
    if not is_list(facts.type):
        return None
    kind = facts.items.type
    if not (pa.types.is_integer(kind) or is_string_type(kind)):
        return _ignored("lists of what is not an id")
    longest = int(pc.max(pc.list_value_length(facts.known)).as_py() or 0)
    cut = LONG_LIST if longest > LONG_LIST else None
    if SEQUENCE.fullmatch(facts.lower):
        config = ColumnConfig(kind="sequence", side=facts.side or "user", max_length=LONG_LIST)
        return config, "lists of ids, by its name in the order of time"
    return ColumnConfig(kind="categorical_list", side=facts.side, max_length=cut), "lists of ids"


def _constant(facts: _Facts) -> _Choice | None:
    return _ignored("all rows have the same value") if facts.distinct < 2 else None


def _time(facts: _Facts) -> _Choice | None:
    by_name = pa.types.is_integer(facts.type) and TIME.fullmatch(facts.lower)
    if not (pa.types.is_temporal(facts.type) or by_name):
        return None
    return ColumnConfig(kind="timestamp"), "points in time; held-out rows are the latest"


def _weight(facts: _Facts) -> _Choice | None:
    if not (is_number(facts.type) and WEIGHT.fullmatch(facts.lower)):
        return None
    return (ColumnConfig(kind="weight"), "a weight, by its name") if _least(facts) >= 0 else None


def _least(facts: _Facts) -> float:
    return float(pc.min(facts.known).as_py())


def _integer_ids(facts: _Facts) -> _Choice | None:
    if not is_number(facts.type) or pa.types.is_boolean(facts.type):
        return None
    values = facts.known.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    whole = bool((values == np.trunc(values)).all())
    few = pa.types.is_integer(facts.type) and facts.distinct <= FEW_IDS
    named = whole and ID.fullmatch(facts.lower)
    if not (few or named):
        return None
    if named and facts.differs_by_row:
        return _ignored("an identifier: nearly every row has a value of its own")
    config = ColumnConfig(kind="categorical", side=facts.side, transform=facts.id_rule)
    return config, "integer ids, by its name" if named else f"only {facts.distinct} integers"


def _number(facts: _Facts) -> _Choice | None:
    if not is_number(facts.type):
        return None
    if pa.types.is_boolean(facts.type):
        return ColumnConfig(kind="dense", side=facts.side), "true or false"
    values = facts.known.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    size = np.abs(values[np.isfinite(values)])
    if not len(size):
        return _ignored("it has no finite values")
    typical, large = np.quantile(size, [0.5, 0.999])
    steps: tuple[str, ...] = ("standardize",)
    why = "numbers"
    if large > SKEWED * max(typical, 1e-9):
        steps, why = ("log1p", "standardize"), "numbers with few large ones, so their logarithm"
    return ColumnConfig(kind="dense", side=facts.side, transform=steps), why


def _string(facts: _Facts) -> _Choice | None:
    if not is_string_type(facts.type):
        return None
    if facts.differs_by_row:
        length = float(pc.mean(pc.binary_length(facts.known)).as_py())
        what = "free text" if length > TEXT_LENGTH else "an identifier"
        return _ignored(f"{what}: nearly every row has a value of its own")
    return ColumnConfig(kind="categorical", side=facts.side, transform=facts.id_rule), "strings"


_RULES = (
    *(_label, _without_values, _map, _list, _constant, _time, _weight, _integer_ids),
    *(_number, _string),
)
"""Tried in this order; the first that has something to say decides."""


def _choice(facts: _Facts) -> _Choice:
    """A column's config without what depends on other columns, and the reason."""
    found = (rule(facts) for rule in _RULES)
    return next((one for one in found if one is not None), _ignored("a type that is not read"))


def _one_of_each(found: list[Inferred]) -> list[Inferred]:
    """At most one timestamp and one weight: the column with the most different values."""
    for kind in ("timestamp", "weight"):
        own = [column for column in found if column.config.kind == kind]
        best = max(own, key=lambda column: column.distinct, default=None)
        found = [
            dataclasses.replace(
                column,
                config=ColumnConfig(kind="ignore"),
                why=f"{best.name} is the {kind} already",
            )
            if best is not None and column in own and column is not best
            else column
            for column in found
        ]
    return found


def _with_weights(found: list[Inferred], table: Any) -> list[Inferred]:
    """Columns of ids beside which a column of weights stands, as one weighted list."""
    by_name = {column.name: column for column in found}
    for column in found:
        for ending in WEIGHTS_OF:
            weights = by_name.get(column.name + ending)
            if weights is None or column.config.kind not in LIST_KINDS:
                continue
            of_weights = table.column(weights.name)
            lengths = [
                pc.fill_null(pc.list_value_length(values), 0)
                for values in (table.column(column.name), of_weights)
                if is_list(values.type)
            ]
            if len(lengths) < 2 or not lengths[0].equals(lengths[1]):
                continue
            config = dataclasses.replace(column.config, kind="weighted_list", weights=weights.name)
            why = f"lists of ids with their weights in {weights.name}"
            by_name[column.name] = dataclasses.replace(column, config=config, why=why)
            why = f"the weights of {column.name}"
            ignored = ColumnConfig(kind="ignore")
            by_name[weights.name] = dataclasses.replace(weights, config=ignored, why=why)
    return list(by_name.values())


def _with_shared_tables(found: list[Inferred], table: Any) -> list[Inferred]:
    """Lists whose items are mostly the values of another column share its table."""
    result = {column.name: column for column in found}
    for column in found:
        if column.config.kind not in LIST_KINDS:
            continue
        items = pc.unique(_items(table.column(column.name).combine_chunks().drop_null()))
        for other in found:
            if other.config.kind != "categorical" or other.distinct <= FEW_IDS:
                continue
            values = table.column(other.name)
            if values.type != items.type or not len(items):
                continue
            if pc.mean(pc.is_in(items, value_set=pc.unique(values))).as_py() < 0.5:
                continue
            rule = other.config.transform
            shared = dataclasses.replace(result[other.name].config, table=other.name)
            result[other.name] = dataclasses.replace(result[other.name], config=shared)
            config = dataclasses.replace(column.config, table=other.name, transform=rule)
            why = f"{column.why}; most are values of {other.name}, so they share its table"
            result[column.name] = dataclasses.replace(column, config=config, why=why)
            break
    return list(result.values())
