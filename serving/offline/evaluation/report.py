"""What was found, as text for a terminal, as JSON, as CSV, and as the files of a folder.

The keys of ``evaluation.json`` are stable: later versions of Tessera may add some.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tessera
from tessera.durable import replacing
from tessera.serving.inspect.summary import table_of
from tessera.serving.offline.evaluation.evaluate import Evaluated
from tessera.serving.offline.evaluation.page import render_page
from tessera.serving.offline.evaluation.results import Measured, Part
from tessera.serving.offline.evaluation.words import about_rows, measured_text, metric_name, number

VERSION = 1
"""Goes up when a key of ``evaluation.json`` is taken away or changes its meaning."""


def json_of(found: Evaluated) -> dict[str, Any]:
    """Everything as dictionaries, lists and numbers; a metric that is not defined is None."""
    names = [model.name for model in found.models]
    labels = {}
    for label, part in found.results.overall.items():
        found_tables = found.results.calibration[label]
        tables = zip(names, found_tables, strict=True) if found_tables else ()
        labels[label] = {
            **_part_json(part, names),
            "calibration_buckets": {
                name: [
                    dict(zip(vars(table), row, strict=True))
                    for row in zip(*(own.tolist() for own in vars(table).values()), strict=True)
                ]
                for name, table in tables
            },
        }
    return {
        "version": VERSION,
        "tessera": tessera.__version__,
        "models": [
            {"name": one.name, "path": str(one.path), "kind": one.kind, **one.about}
            for one in found.models
        ],
        "data": {
            "format": found.opened.config.format,
            "paths": list(found.opened.config.paths()),
            "split": found.opened.split,
            "rows": found.scored.rows,
            "available_rows": found.scored.available,
            "malformed_rows": found.opened.malformed,
            "weight": found.looks.weight,
            "group": found.looks.group,
            "groups": found.results.groups,
            "cluster": found.looks.cluster,
            "clusters": found.results.clusters,
        },
        "labels": labels,
        "slices": [
            {"column": part.column, "value": part.value, "label": part.label}
            | _part_json(part, names)
            for part in found.results.slices
        ],
        "importance": [
            {
                "model": names[one.model],
                "label": one.label,
                "column": one.column,
                "features": list(one.features),
                "losses": {name: loss.to_json() for name, loss in one.losses.items()},
            }
            for one in found.importance
        ],
    }


def _part_json(part: Part, names: Sequence[str]) -> dict[str, Any]:
    def plain(metrics: Mapping[str, Measured]) -> dict[str, Any]:
        return {name: measured.to_json() for name, measured in metrics.items()}

    return {
        "task": part.task,
        "rows": part.rows,
        "share": part.share,
        "positives": part.positives,
        "mean_label": None if math.isnan(part.mean_label) else part.mean_label,
        "models": {name: plain(own) for name, own in zip(names, part.models, strict=True)},
        "differences": {
            name: plain(own) for name, own in zip(names[1:], part.differences, strict=True)
        },
    }


def json_text(found: Evaluated) -> str:
    """`json_of` as text with a line's end."""
    return json.dumps(json_of(found), indent=1) + "\n"


def slices_csv(found: Evaluated) -> str:
    """A line for each slice and model, and for each difference to the first model."""
    names = [model.name for model in found.models]
    metrics = list(dict.fromkeys(name for part in found.results.slices for name in part.models[0]))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    head = [
        "column",
        "value",
        "label",
        "model",
        "minus",
        "rows",
        "share",
        "positives",
        "mean_label",
    ]
    errors = [f"{name}_standard_error" for name in metrics]
    writer.writerow([*head, *(one for pair in zip(metrics, errors, strict=True) for one in pair)])
    for part in found.results.slices:
        of_models = [(name, "", own) for name, own in zip(names, part.models, strict=True)]
        of_models += [
            (name, names[0], own) for name, own in zip(names[1:], part.differences, strict=True)
        ]
        about = [part.column, part.value, part.label]
        counts = [part.rows, part.share, "" if part.positives is None else part.positives]
        for model, minus, own in of_models:
            cells = [own[name] for name in metrics if name in own]
            values = [cell for one in cells for cell in (one.value, one.standard_error)]
            writer.writerow(
                [
                    *about,
                    model,
                    minus,
                    *counts,
                    *("" if math.isnan(v) else v for v in (part.mean_label, *values)),
                ]
            )
    return stream.getvalue()


def printed(found: Evaluated) -> str:
    """Tables for a terminal."""
    names = [model.name for model in found.models]
    lines = [about_rows(found)]
    for label, part in found.results.overall.items():
        lines += ["", f"{label}: {_counts(part)}", *_overall(part, names)]
        lines += _slices(label, found.results.slices, names)
    lines += _importance(found, names)
    return "\n".join(lines) + "\n"


def _counts(part: Part) -> str:
    if part.positives is None:
        return f"{part.rows:,} rows, mean {number(part.mean_label)}"
    return f"{part.rows:,} rows, {part.positives:,} positive ({part.positives / part.rows:.2%})"


def _overall(part: Part, names: Sequence[str]) -> list[str]:
    head = ["", *names, *(f"{name} - {names[0]}" for name in names[1:])]
    return table_of(
        head,
        (
            [
                metric_name(metric),
                *(measured_text(own[metric]) for own in part.models),
                *(measured_text(own[metric], sign=True) for own in part.differences),
            ]
            for metric in part.models[0]
        ),
    )


def _slices(label: str, slices: Iterable[Part], names: Sequence[str]) -> list[str]:
    lines: list[str] = []
    own = [part for part in slices if part.label == label]
    for column in dict.fromkeys(part.column for part in own):
        parts = [part for part in own if part.column == column]
        # The metrics that tell slices apart, as there is not room for all.
        metrics = [
            name
            for name in ("auc", "log_loss", "calibration", "gauc")
            if name in parts[0].models[0]
        ]
        if parts[0].task == "regression":
            metrics = ["root_mean_squared_error", "mean_absolute_error", "calibration"]
        for place, name in enumerate(names):
            counts = ["rows"] if parts[0].positives is None else ["rows", "positive"]
            head = [f"{label} by {column}{f', {name}' if len(names) > 1 else ''}", *counts]
            rows = [
                [
                    str(part.value),
                    f"{part.rows:,}",
                    *([] if part.positives is None else [f"{part.positives:,}"]),
                    *(measured_text(part.models[place][metric]) for metric in metrics),
                ]
                for part in parts
            ]
            lines += ["", *table_of([*head, *map(metric_name, metrics)], rows)]
    return lines


def _importance(found: Evaluated, names: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for place, name in enumerate(names):
        for label in found.results.overall:
            own = [one for one in found.importance if (one.model, one.label) == (place, label)]
            if not own:
                continue
            metrics = list(own[0].losses)
            title = f"what {name} loses for {label} without a column"
            head = [title, *(f"{metric_name(metric)} worse by" for metric in metrics)]
            rows = (
                [one.column, *(measured_text(one.losses[metric]) for metric in metrics)]
                for one in own
            )
            lines += ["", *table_of(head, rows)]
    return lines


def write_files(found: Evaluated, folder: Path) -> None:
    """Write ``evaluation.json``, ``slices.csv`` and ``report.html``, each whole or not at all.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "evaluation.json": json_text(found),
        "slices.csv": slices_csv(found),
        "report.html": render_page(found),
    }
    for name, text in texts.items():
        with replacing(folder / name) as stream:
            stream.write(text.encode())
