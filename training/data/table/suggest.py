"""A whole training config for columns that were inferred, as YAML text with the reasons."""

from __future__ import annotations

import math
from typing import Any

import yaml

from tessera.training.data.columns import SPARSE_KINDS, ColumnConfig
from tessera.training.data.table.infer import Inferred
from tessera.training.typed_config import to_plain

FEWEST_ROWS = 1_000
MOST_ROWS = 5_000_000


def suggest_config(
    paths: list[str], columns: list[Inferred], *, sample_rows: int, total_rows: int
) -> str:
    """The text of a config that `tessera train` runs.

    Args:
        paths: of the data, as they were given.
        columns: what was inferred.
        sample_rows: how many rows it was inferred from.
        total_rows: how many rows there are, about.
    """
    kinds = [column.config.kind for column in columns]
    lines = [
        f"# Written by tessera schema from {sample_rows:,} of about {total_rows:,} rows.",
        "# Change what you know better.",
        "data:",
        "  format: table",
        f"  path: {_flow(paths[0] if len(paths) == 1 else paths)}",
        f"  split: {'time' if 'timestamp' in kinds else 'random'}",
        "  columns:",
    ]
    lines += [
        f"    {_flow(column.name)}: {_flow(_plain(column.config))}  # {column.why}"
        for column in columns
    ]
    lines += ["model:", *_model(columns, sample_rows, total_rows)]
    lines += ["train:", *_train(columns, total_rows)]
    return "\n".join(lines) + "\n"


def _plain(config: ColumnConfig) -> dict[str, Any]:
    return {name: value for name, value in to_plain(config).items() if value not in (None, [])}


def _flow(value: Any) -> str:
    """YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf)
    return text.strip().removesuffix("...").strip()


def _model(columns: list[Inferred], sample_rows: int, total_rows: int) -> list[str]:
    lines = ["  arch: dlrm", "  embedding_dim: 16"]
    tables: dict[str, dict[str, Any]] = {}
    hashed: dict[str, int] = {}
    for column in columns:
        config = column.config
        if config.kind not in SPARSE_KINDS:
            continue
        if config.kind == "weighted_list":
            tables[column.name] = {"weighted": True}
        if not config.transform:  # the transform decides the rows otherwise
            table = config.table or column.name
            rows = _table_rows(column, sample_rows, total_rows)
            hashed[table] = max(rows, hashed.get(table, 0))
    for column in columns:
        table = column.config.table or column.name
        if column.config.kind in SPARSE_KINDS and not column.config.transform:
            tables[column.name] = {"rows": hashed[table], **tables.get(column.name, {})}
    if tables:
        lines.append("  tables:")
        lines += [f"    {_flow(name)}: {_flow(own)}" for name, own in tables.items()]
    return lines


def _table_rows(column: Inferred, sample_rows: int, total_rows: int) -> int:
    """Rows for about twice as many ids as all rows may have."""
    grows = column.distinct > 0.1 * sample_rows
    expected = column.distinct * (total_rows / max(1, sample_rows) if grows else 1)
    return int(min(MOST_ROWS, max(FEWEST_ROWS, 2 ** math.ceil(math.log2(2 * max(1, expected))))))


def _train(columns: list[Inferred], total_rows: int) -> list[str]:
    sizes = ((100_000, 256, 3), (2_000_000, 1024, 2), (math.inf, 4096, 1))
    _, batch, epochs = next(size for size in sizes if total_rows <= size[0])
    lines = [f"  batch_size: {batch}", f"  epochs: {epochs}"]
    tasks = [column.config.task for column in columns if column.config.kind == "label"]
    if "binary" not in tasks:
        lines.append("  metric: log_loss")
    return lines
