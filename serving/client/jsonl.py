"""Samples from JSON lines: the input format of ``tessera predict --input``.

One sample per line.  With the model's schema, by name:

    {"dense": {"I1": 0.5, "I2": null}, "sparse": {"C1": [7], "C2": []},
     "weights": {"C3": [0.5]}}

``null`` or an absent name is a missing dense value; an absent sparse feature has no ids.
``dense`` may also be a list in the model's order.  Without the schema only positions are known,
so both are lists: ``{"dense": [0.5, null], "sparse": [[7], []]}``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from tessera.errors import UserError
from tessera.serving.client.arrays import Array, Bags
from tessera.serving.client.assemble import nearest
from tessera.serving.package.schema import InputSchema

_ID_MIN, _ID_MAX = -(2**63), 2**63 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)
# How many dense values and how many sparse features a sample has.
_Shape: TypeAlias = tuple[int, int]
_KEYS = ("dense", "sparse", "weights")


@dataclass(frozen=True, kw_only=True)
class LineBatch:
    """Consecutive samples, ready for ``predict``; lines are counted from 1.

    ``dense`` is ``[size, F]`` float32 or None; ``sparse`` has the bags in the model's order.
    """

    first_line: int
    last_line: int
    size: int
    dense: Array | None
    sparse: dict[str, Bags]


@dataclass(frozen=True)
class _Sample:
    """One line: dense values, and (ids, weights or None) of each feature."""

    dense: list[float]
    bags: dict[str, tuple[list[int], list[float] | None]]


def read_batches(
    lines: Iterable[str], *, batch_size: int, schema: InputSchema | None
) -> Iterator[LineBatch]:
    """Samples in batches of ``batch_size``, the last one perhaps smaller; empty lines are skipped.

    Lines are read as they are needed, so the input may be longer than memory.

    Raises:
        UserError: a line is not such a sample; the message begins with the line's number.
    """
    samples: list[_Sample] = []
    first_line = last_line = 0
    shape: _Shape | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            sample = _by_name(line, schema) if schema is not None else _by_position(line)
            shape = _same_shape(sample, shape)
        except UserError as error:
            raise UserError(f"line {number}: {error}") from error
        if not samples:
            first_line = number
        last_line = number
        samples.append(sample)
        if len(samples) == batch_size:
            yield _batch(samples, first_line, last_line)
            samples = []
    if samples:
        yield _batch(samples, first_line, last_line)


def is_raw_row(line: str) -> bool:
    """Whether a line is a row of raw values, and not a sample as described above."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and bool(record.keys() - set(_KEYS))


def _same_shape(sample: _Sample, before: _Shape | None) -> _Shape:
    shape = (len(sample.dense), len(sample.bags))
    if before is not None and shape != before:
        raise UserError(
            f"{shape[0]} dense values and {shape[1]} sparse features;"
            f" the lines before have {before[0]} and {before[1]}"
        )
    return shape


def _batch(samples: list[_Sample], first_line: int, last_line: int) -> LineBatch:
    sparse = {}
    for name, (_, weights) in samples[0].bags.items():
        ids = [sample.bags[name][0] for sample in samples]
        given = None if weights is None else [sample.bags[name][1] or [] for sample in samples]
        sparse[name] = Bags.from_lists(ids, given)
    dense = None
    if samples[0].dense:
        dense = np.array([sample.dense for sample in samples], dtype=np.float32)
    lines = {"first_line": first_line, "last_line": last_line}
    return LineBatch(**lines, size=len(samples), dense=dense, sparse=sparse)


def _parse(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise UserError(f"a JSON {_kind(record)}; a sample is an object with {' and '.join(_KEYS)}")
    for key in record:
        if key not in _KEYS:
            raise UserError(f"unknown key {key!r}; {nearest(key, _KEYS)}")
    return record


def _by_name(line: str, schema: InputSchema) -> _Sample:
    record = _parse(line)
    dense = _named_dense(record.get("dense", {}), schema)
    ids = _mapping(record.get("sparse", {}), "sparse")
    weights = _mapping(record.get("weights", {}), "weights")
    groups = {feature.name: feature.group for feature in schema.features}
    for part, names in (("sparse", ids), ("weights", weights)):
        for name in names:
            if name not in groups:
                raise UserError(f"{part}: no feature {name!r}; {nearest(name, groups)}")
    bags: dict[str, tuple[list[int], list[float] | None]] = {}
    for name, group in groups.items():
        bag = _ids(ids.get(name, []), name)
        if group == "id_list":
            if name in weights:
                raise UserError(f"weights: feature {name!r} takes none in this model")
            bags[name] = (bag, None)
            continue
        if name not in weights and bag:
            raise UserError(f"weights: feature {name!r} needs one weight per id")
        given = weights.get(name, [])
        if not isinstance(given, list) or len(given) != len(bag):
            raise UserError(f"weights: feature {name!r} needs a list of {len(bag)}, one per id")
        bags[name] = (bag, [_float(value, f"weights of {name!r}") for value in given])
    return _Sample(dense, bags)


def _named_dense(given: Any, schema: InputSchema) -> list[float]:
    names = schema.dense_features
    if isinstance(given, list):
        if len(given) != len(names):
            raise UserError(f"dense: {len(given)} values; the model has {len(names)}")
        values: Mapping[str, Any] = dict(zip(names, given, strict=True))
    else:
        values = _mapping(given, "dense")
        for name in values:
            if name not in names:
                raise UserError(f"dense: no feature {name!r}; {nearest(name, names)}")
    row = [_dense_value(values.get(name), name) for name in names]
    if schema.dense_missing == "refuse":
        for name, value in zip(names, row, strict=True):
            if math.isnan(value):
                raise UserError(f"dense: {name!r} has no value and this model needs one")
    return row


def _by_position(line: str) -> _Sample:
    record = _parse(line)
    if "weights" in record:
        raise UserError("weights need the model's schema; give --model-file MODEL.pt")
    for part in ("dense", "sparse"):
        if not isinstance(record.get(part, []), list):
            raise UserError(
                f"{part}: a JSON {_kind(record[part])}; named features need the model's schema,"
                " give --model-file MODEL.pt, or a list in the model's order"
            )
    dense = [_dense_value(value, str(i)) for i, value in enumerate(record.get("dense", []))]
    sparse = record.get("sparse", [])
    if not dense and not sparse:
        raise UserError("the sample is empty: it has neither dense nor sparse values")
    return _Sample(dense, {str(i): (_ids(bag, str(i)), None) for i, bag in enumerate(sparse)})


def _mapping(value: Any, part: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{part}: a JSON {_kind(value)}; give an object of names and values")
    return value


def _ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list):
        raise UserError(f"sparse: feature {name!r} is a JSON {_kind(value)}; give a list of ids")
    for item in value:
        if type(item) is not int:
            raise UserError(f"sparse: feature {name!r} holds {item!r}; ids are integers")
        if not _ID_MIN <= item <= _ID_MAX:
            raise UserError(
                f"sparse: feature {name!r} holds {item}, which does not fit in a signed 64-bit"
                " integer; subtract 2**64 from larger hashes"
            )
    return value


def _dense_value(value: Any, name: str) -> float:
    return math.nan if value is None else _float(value, f"dense feature {name!r}")


def _float(value: Any, what: str) -> float:
    if type(value) not in (int, float):
        raise UserError(f"{what}: a JSON {_kind(value)}; give a number")
    # The json module reads NaN and Infinity, which JSON does not have; a missing value is null.
    if not abs(value) <= _FLOAT32_MAX:
        raise UserError(
            f"{what}: {value} is not a finite 32-bit number; write null where it is missing"
        )
    return float(value)


def _kind(value: Any) -> str:
    kinds = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")
