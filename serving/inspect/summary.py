"""The text that a person reads about a package, from its manifest alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tessera.serving.package.evaluation import Evaluation, Quality
from tessera.serving.package.manifest import Manifest, TableInfo
from tessera.serving.package.schema import RAW_SINCE, InputSchema

MOST_TABLES = 30
"""With more tables than this, only those that lost most are listed."""

_WORST_TABLES = 10


def summarize(manifest: Manifest) -> str:
    """What packaging did: sizes, quantization errors, quality before and after."""
    lines = [
        _sizes(manifest),
        f"operators: {_operators(manifest)}",
        "",
        *_tables(manifest.tables),
        "",
        *_quality(manifest.evaluation),
    ]
    return "\n".join(lines)


def describe(manifest: Manifest, *, path: str, file_bytes: int, shares_rows: bool) -> str:
    """Everything that ``tessera inspect`` shows of the file ``path``.

    ``shares_rows`` says whether the model looks shared features up once.
    """
    versions, schema = manifest.versions, manifest.schema
    written = f"tessera {versions.tessera}, torch {versions.torch}, fbgemm {versions.fbgemm or '-'}"
    facts = {
        "file": f"{path} ({human_bytes(file_bytes)})",
        "model": f"{manifest.name}, version {manifest.version}",
        "created": manifest.created,
        "from": ", ".join(f"{key} {value}" for key, value in manifest.source.items()) or "-",
        "written by": written,
        "runs with": f"torch >={versions.torch_min},<{versions.torch_below}",
        "operators": _operators(manifest),
        "device": manifest.device,
        "plan": _plan(manifest),
        "signature": _signature(manifest),
        "shared": "looked up once" if shares_rows else "repeated for every sample",
        "outputs": ", ".join(f"{output.name} {_shape(output.width)}" for output in schema.outputs),
        "dense": ", ".join(schema.dense_features) or "-",
        "missing": schema.dense_missing,
        "raw values": _raw_values(manifest),
        "not inputs": ", ".join(f"{one.name} ({one.role})" for one in schema.other_columns) or "-",
    }
    width = max(len(name) for name in facts)
    columns = (
        "group",
        "strings",
        "hex",
        "table",
        "rows",
        "dim",
        "pooling",
        "hashing",
        "out_of_range",
    )
    features = table_of(
        ("feature", *(column.replace("_", " ") for column in columns)),
        [(f.name, *(_cell(getattr(f, column)) for column in columns)) for f in schema.features],
    )
    lines = [f"{name:<{width}}  {value}" for name, value in facts.items()]
    parts = [*lines, "", *features, "", *_ranges(schema), *_shards(manifest), summarize(manifest)]
    return "\n".join([*parts, *_training(manifest)])


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _ranges(schema: InputSchema) -> list[str]:
    """What the training rows held of each dense feature; nothing where that is not known."""
    rows = [
        (name, *("-" if end is None else f"{end:g}" for end in (own.least, own.most)), share)
        for name, own, share in (
            (name, own, f"{own.missing:.1%}")
            for name, own in zip(schema.dense_features, schema.dense_ranges, strict=False)
        )
    ]
    if not rows:
        return []
    head = ("in the training rows", "least", "most", "missing")
    return [*table_of(head, rows), ""]


def _raw_values(manifest: Manifest) -> str:
    """What the model does with raw values, which depends on the version of the format."""
    if manifest.format_version >= RAW_SINCE:
        return f"transformed by the model; strings become ids by {manifest.schema.string_hash}"
    return f"transformed by the client: {manifest.schema.dense_transform or '-'}"


def _shape(width: int) -> str:
    return "[B]" if width == 1 else f"[B, {width}]"


def _plan(manifest: Manifest) -> str:
    devices = sorted({placement.device for placement in manifest.plan.placements})
    shards = manifest.plan.num_shards
    return f"{shards} shard{'' if shards == 1 else 's'} on {', '.join(devices)}"


def _signature(manifest: Manifest) -> str:
    if manifest.signature is None:
        return "none"
    return f"says key {manifest.signature.public_key} ('tessera verify --public-key' checks it)"


def _shards(manifest: Manifest) -> list[str]:
    """Where the pieces of the tables lie; nothing where all is in one place."""
    if manifest.plan.num_shards == 1:
        return []
    tables = {table.name: table for table in manifest.tables}
    rows = []
    for at in sorted(manifest.plan.placements, key=lambda at: (at.shard, at.table)):
        table = tables[at.table]
        share = (at.row_end - at.row_begin) * (at.column_end - at.column_begin)
        size = table.bytes * share // (table.rows * table.dim)
        spans = (f"{at.row_begin} to {at.row_end}", f"{at.column_begin} to {at.column_end}")
        rows.append((str(at.shard), at.device, at.table, *spans, human_bytes(size)))
    head = ("shard", "device", "table", "rows", "columns", "about")
    return ["where the tables lie:", *table_of(head, rows), ""]


def _operators(manifest: Manifest) -> str:
    return f"{manifest.backend} ({', '.join(manifest.operator_libraries)})"


def _sizes(manifest: Manifest) -> str:
    before, after = manifest.bytes_fp32, manifest.bytes_packaged
    ratio = f", {before / after:.2f} times smaller" if after else ""
    return (
        f"weights: {human_bytes(before)} fp32 -> {human_bytes(after)} "
        f"(tables {manifest.dtype}, dense layers {manifest.dense_dtype}){ratio}"
    )


def _tables(tables: Sequence[TableInfo]) -> list[str]:
    shown = sorted(tables, key=lambda table: table.relative_rmse, reverse=True)
    heading = f"quantization error of {len(tables)} table{'s' * (len(tables) != 1)}"
    if len(tables) > MOST_TABLES:
        shown = shown[:_WORST_TABLES]
        heading += f", the {len(shown)} with the largest"
    rows = []
    for t in shown:
        errors = (f"{t.max_abs_error:.3g}", f"{t.rmse:.3g}", f"{t.relative_rmse:.3%}")
        rows.append((t.name, str(t.rows), str(t.dim), t.dtype, human_bytes(t.bytes), *errors))
    head = ("table", "rows", "dim", "dtype", "size", "max abs", "rmse", "relative rmse")
    return [f"{heading}:", *table_of(head, rows)]


def _quality(evaluation: Evaluation | None) -> list[str]:
    if evaluation is None:
        return ["quality after quantization: not measured"]

    heading = (
        f"quality on {evaluation.rows} validation rows (largest change of one score "
        f"{evaluation.max_abs_score_error:.2g}):"
    )
    rows = []
    for name, before, after in _measured(evaluation):
        change = None if before is None or after is None else after - before
        rows.append((name, _number(before), _number(after), _number(change, signed=True)))
    table = table_of(("", "fp32", "packaged", "change"), rows)
    return [heading, *table, *_members(evaluation)]


def _measured(evaluation: Evaluation) -> list[tuple[str, float | None, float | None]]:
    """What was measured before and after, each with its name; that of a label, if there are several."""
    if not evaluation.labels:  # as before version 5
        names = Quality.__dataclass_fields__
        pairs = [(vars(evaluation.fp32)[name], vars(evaluation.packaged)[name]) for name in names]
        return [(_WORDS[name], *pair) for name, pair in zip(names, pairs, strict=True)]
    several = len(evaluation.labels) > 1
    return [
        (f"{label} {_words(metric)}" if several else _words(metric), before, own.packaged[metric])
        for label, own in evaluation.labels.items()
        for metric, before in own.fp32.items()
        if metric in own.packaged
    ]


def _members(evaluation: Evaluation) -> list[str]:
    """The members of an ensemble beside it, all in fp32, by the first metrics of each label."""
    if not evaluation.members:
        return []
    whole = {label: own.fp32 for label, own in evaluation.labels.items()}
    shown = [(label, name) for label, own in whole.items() for name in own if name in _OF_MEMBERS]
    several = len(whole) > 1
    rows = [
        (name, *(_number(by_label.get(label, {}).get(metric)) for label, metric in shown))
        for name, by_label in {"ensemble": whole, **evaluation.members}.items()
    ]
    head = [f"{label} {_words(name)}" if several else _words(name) for label, name in shown]
    return ["", "the ensemble and its members, fp32:", *table_of(("", *head), rows)]


_WORDS = {
    "auc": "AUC",
    "normalised_entropy": "normalised entropy",
    "log_loss": "log loss",
    "calibration": "calibration",
    "root_mean_squared_error": "RMSE",
    "mean_absolute_error": "MAE",
    "r_squared": "R squared",
}
_OF_MEMBERS = ("auc", "log_loss", "root_mean_squared_error")


def _words(metric: str) -> str:
    return _WORDS.get(metric, metric)


def _training(manifest: Manifest) -> list[str]:
    if not manifest.training_metrics:
        return []
    names = list(dict.fromkeys(n for split in manifest.training_metrics.values() for n in split))
    rows = [
        (split, *(_number(metrics.get(name)) for name in names))
        for split, metrics in manifest.training_metrics.items()
    ]
    return ["", "metrics that training stored:", *table_of(("split", *names), rows)]


def _number(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:+.6f}" if signed else f"{value:.6f}"


def table_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, numbers to the right."""
    cells = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        first = f"  {row[0]:<{widths[0]}}"
        rest = (f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        return "  ".join([first, *rest])

    return [line(row) for row in cells]


def human_bytes(count: int) -> str:
    """``count`` bytes in powers of 1024, such as ``1.5 MiB``."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
