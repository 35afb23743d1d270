"""What differs between two packages: schema, tables, sizes, and the answers to the same requests."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.serving.package.golden import read_golden
from tessera.serving.package.loading import LoadedPackage, cpu_instead, load_package
from tessera.serving.package.manifest import GOLDEN_RECORD, Manifest, TableInfo
from tessera.serving.package.records import Records
from tessera.serving.package.runner import HostBatch, Runner
from tessera.serving.package.schema import FeatureSpec, InputSchema
from tessera.serving.package.time_limit import TimeLimit

LONGEST_BAG = 8
"""Ids in the longest bag of a random request."""

_BATCH_SAMPLES = 64
_MAX_GOLDEN_BYTES = 256 << 20
# Differ between any two packages; they are shown and count for nothing.
_ABOUT = ("name", "version", "created", "source", "versions", "backend", "device", "signature")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that differs, in words: ``a`` of the first package, ``b`` of the second."""

    what: str
    a: str
    b: str


@dataclass(frozen=True, kw_only=True)
class AnswerDifference:
    """How far one output's answers are apart.

    ``samples`` are the requests that both answered, ``differing`` those whose answers have other
    bits.  In ``max_abs`` and ``mean_abs``, NaN against a number counts as infinite.
    """

    output: str
    samples: int
    differing: int
    max_abs: float
    mean_abs: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two packages side by side: what differs.

    Attributes:
        about: names, times, versions and signatures; never of weight.
        tables: the tables' sizes or types, and the dense layers' type.
        sizes: bytes of the files and of the weights.
        answers: one entry per output that both have.
        not_compared: why there are no answers; empty where there are.
    """

    about: tuple[Change, ...]
    schema: tuple[Change, ...]
    tables: tuple[Change, ...]
    sizes: tuple[Change, ...]
    answers: tuple[AnswerDifference, ...]
    not_compared: str

    def same(self, *, atol: float) -> bool:
        """Whether schema and tables are alike and no answer is more than ``atol`` apart."""
        alike = not self.schema and not self.tables and not self.not_compared
        return alike and all(answer.max_abs <= atol for answer in self.answers)

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable form; an infinite difference is null there."""
        data = asdict(self)
        for answer in data["answers"]:
            for key in ("max_abs", "mean_abs"):
                answer[key] = answer[key] if math.isfinite(answer[key]) else None
        return data


def compare(
    a: str | Path,
    b: str | Path,
    *,
    samples: int,
    seed: int = 0,
    allow_ops: Collection[str] = (),
    time_limit: TimeLimit | None = None,
) -> Comparison:
    """Load two packages and compare them, on the CPU where one is for GPUs and there is no GPU.

    Scored are the golden requests of both and ``samples`` random ones, drawn from ``seed``; ``allow_ops`` and
    ``time_limit``, for each of the two, are those of `load_package`.

    Raises:
        PackageError: one of them cannot be loaded.
    """
    first, second = (
        load_package(path, devices=cpu_instead(path), allow_ops=allow_ops, time_limit=time_limit)
        for path in (a, b)
    )
    one, other = first.manifest, second.manifest
    reason = _inputs_differ(one.schema, other.schema)
    answers: tuple[AnswerDifference, ...] = ()
    if not reason:
        batches = _batches(first, second, samples, seed)
        names = [output.name for output in one.schema.outputs]
        answers = tuple(differences(names, first.runner, second.runner, batches))
    return Comparison(
        about=tuple(_fields(one, other, _ABOUT)),
        schema=tuple(_schemas(one.schema, other.schema)),
        tables=tuple(_weights(one, other)),
        sizes=tuple(_sizes(first, second)),
        answers=answers,
        not_compared=reason,
    )


def _fields(a: object, b: object, names: Sequence[str], prefix: str = "") -> Iterator[Change]:
    for name in names:
        one, other = getattr(a, name), getattr(b, name)
        if one != other:
            yield Change(what=f"{prefix}{name}", a=_text(one), b=_text(other))


def _text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items()) or "-"
    if isinstance(value, tuple):
        return ", ".join(_text(item) for item in value) or "-"
    if hasattr(value, "__dataclass_fields__"):
        return ", ".join(f"{key} {_text(item)}" for key, item in vars(value).items())
    return str(value) or "-"


_SCHEMA_FIELDS = (
    *("dense_features", "dense_missing", "dense_transform", "dense_columns", "string_hash"),
    "outputs",
)


def _schemas(a: InputSchema, b: InputSchema) -> Iterator[Change]:
    yield from _fields(a, b, _SCHEMA_FIELDS)
    order = [[feature.name for feature in schema.features] for schema in (a, b)]
    if sorted(order[0]) == sorted(order[1]) and order[0] != order[1]:
        yield Change(what="order of features", a=_text(tuple(order[0])), b=_text(tuple(order[1])))
    yield from _by_name("feature", a.features, b.features)


def _weights(a: Manifest, b: Manifest) -> Iterator[Change]:
    shape = ("rows", "dim", "dtype", "bytes")
    yield from _by_name("table", a.tables, b.tables, shape)
    yield from _fields(a, b, ("dense_dtype",))


def _by_name(
    kind: str,
    a: Sequence[FeatureSpec] | Sequence[TableInfo],
    b: Sequence[FeatureSpec] | Sequence[TableInfo],
    names: Sequence[str] | None = None,
) -> Iterator[Change]:
    """Members that only one side has, and the fields in which those of both differ."""
    one, other = ({item.name: item for item in items} for items in (a, b))
    for name in dict.fromkeys([*one, *other]):
        if name not in one or name not in other:
            a_has, b_has = ("there" if name in side else "missing" for side in (one, other))
            yield Change(what=f"{kind} {name}", a=a_has, b=b_has)
        else:
            fields = names or list(vars(one[name]))
            yield from _fields(one[name], other[name], fields, f"{kind} {name}: ")


def _sizes(a: LoadedPackage, b: LoadedPackage) -> Iterator[Change]:
    files = [package.path.stat().st_size for package in (a, b)]
    if files[0] != files[1]:
        yield Change(what="bytes of the file", a=str(files[0]), b=str(files[1]))
    yield from _fields(a.manifest, b.manifest, ("bytes_packaged", "bytes_fp32"))


def _inputs_differ(a: InputSchema, b: InputSchema) -> str:
    """Why one request cannot be put to both; empty where it can."""
    if len(a.dense_features) != len(b.dense_features):
        return f"{len(a.dense_features)} dense features against {len(b.dense_features)}"
    for group in ("id_list", "id_score_list"):
        names = [[feature.name for feature in schema.group(group)] for schema in (a, b)]
        if names[0] != names[1]:
            return f"their {group} features, or their order, are not the same"
    if not {output.name for output in a.outputs} & {output.name for output in b.outputs}:
        return "they have no output in common"
    return ""


def _batches(a: LoadedPackage, b: LoadedPackage, samples: int, seed: int) -> Iterator[HostBatch]:
    for package in (a, b):
        content = Records(package.path).read(GOLDEN_RECORD, max_bytes=_MAX_GOLDEN_BYTES)
        yield read_golden(content)[0]
    generator = torch.Generator().manual_seed(seed)
    for begin in range(0, samples, _BATCH_SAMPLES):
        count = min(_BATCH_SAMPLES, samples - begin)
        yield random_batch(a.manifest, b.manifest, count, generator)


def random_batch(a: Manifest, b: Manifest, samples: int, generator: torch.Generator) -> HostBatch:
    """A batch that both packages take.

    Bags have 0 to `LONGEST_BAG` ids: of features that hash theirs any 64-bit number, of the others
    rows that both tables have.  Dense values are normal, a tenth of them missing where both
    packages allow that.
    """
    groups: dict[str, tuple[Tensor, Tensor]] = {}
    for group in ("id_list", "id_score_list"):
        pairs = list(zip(a.schema.group(group), b.schema.group(group), strict=True))
        shape = (len(pairs), samples)
        drawn = torch.randint(0, LONGEST_BAG + 1, shape, generator=generator, dtype=torch.int32)
        bags = [
            _ids(pair, int(own.sum()), generator) for pair, own in zip(pairs, drawn, strict=True)
        ]
        groups[group] = drawn.flatten(), torch.cat([*bags, torch.empty(0, dtype=torch.int64)])
    dense = torch.randn(samples, len(a.schema.dense_features), generator=generator)
    if a.schema.dense_missing == b.schema.dense_missing == "nan":
        dense[torch.rand(dense.shape, generator=generator) < 0.1] = torch.nan
    scored = groups["id_score_list"]
    weights = torch.rand(len(scored[1]), generator=generator)
    return HostBatch.of(dense, groups["id_list"], (*scored, weights))


def _ids(pair: Sequence[FeatureSpec], count: int, generator: torch.Generator) -> Tensor:
    if all(feature.hashing != "none" for feature in pair):
        high = torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator)
        return (high << 32) + torch.randint(0, 1 << 32, (count,), generator=generator)
    rows = min(feature.rows for feature in pair)
    return torch.randint(0, rows, (count,), generator=generator)


def differences(
    names: Sequence[str], a: Runner, b: Runner, batches: Iterable[HostBatch]
) -> Iterator[AnswerDifference]:
    """Put the same requests to both.

    Of ``names``, outputs that one does not have, or has in another width, are left out.
    """
    apart: dict[str, list[Tensor]] = {}
    for batch in batches:
        one, other = a.forward(batch), b.forward(batch)
        for name in names:
            if name in one and name in other and one[name].shape == other[name].shape:
                apart.setdefault(name, []).append(_apart(one[name], other[name]))
    for name, pieces in apart.items():
        whole = torch.cat(pieces)
        yield AnswerDifference(
            output=name,
            samples=len(whole),
            differing=int((whole != 0).any(dim=1).sum()),
            max_abs=whole.max().item(),
            mean_abs=whole.mean().item(),
        )


def _apart(one: Tensor, other: Tensor) -> Tensor:
    """``[B, width]`` float64; two NaNs are alike, one alone is infinitely far from anything."""
    left, right = (answer.reshape(len(answer), -1).double() for answer in (one, other))
    apart = (left - right).abs()
    apart[(left == right) | (left.isnan() & right.isnan())] = 0
    return apart.nan_to_num(nan=torch.inf, posinf=torch.inf)
