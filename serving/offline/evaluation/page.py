"""``report.html``: one file that needs nothing else, in the reader's light or dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from tessera.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, svg_of
from tessera.report_page import render_page as from_template
from tessera.serving.offline.evaluation.evaluate import Evaluated
from tessera.serving.offline.evaluation.importance import Importance
from tessera.serving.offline.evaluation.results import Part
from tessera.serving.offline.evaluation.words import about_rows, measured_text, metric_name
from tessera.training.metrics.binary import CalibrationTable, Curves, curves

HISTOGRAM_BINS = 50
MOST_POINTS = 400
"""Points of a curve; a curve of more is drawn through so many of them."""

MOST_BARS = 30
_COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
_SIZE = (4.6, 3.2)


@dataclass(frozen=True)
class Plot:
    """A plot with its title and what it shows, in a sentence."""

    title: str
    note: str
    svg: str


@dataclass(frozen=True)
class Table:
    """A table: its title, its head, and rows of cells whose first is a name."""

    title: str
    head: list[str]
    rows: list[list[str]]


def render_page(found: Evaluated) -> str:
    """The page as HTML."""
    names = [model.name for model in found.models]
    sections = [
        {
            "label": label,
            "tables": [_overall(part, names)],
            "plots": _plots(found, label),
            "slices": _slices(found, label),
            "importance": _importance(found, label),
        }
        for label, part in found.results.overall.items()
    ]
    return from_template(
        Path(__file__).parent / "page.html",
        names=names,
        about=about_rows(found),
        models=[
            (
                model.name,
                model.kind,
                str(model.path),
                ", ".join(f"{k} {v}" for k, v in model.about.items()),
            )
            for model in found.models
        ],
        sections=sections,
    )


def _overall(part: Part, names: Sequence[str]) -> Table:
    rows = [["rows", *(f"{part.rows:,}" for _ in names)]]
    if part.positives is not None:
        rows.append(["rows with label 1", *(f"{part.positives:,}" for _ in names)])
    rows[:] = [[*row, *("" for _ in part.differences)] for row in rows]
    for metric in part.models[0]:
        cells = [measured_text(own[metric]) for own in part.models]
        cells += [measured_text(own[metric], sign=True) for own in part.differences]
        rows.append([metric_name(metric), *cells])
    return Table("", ["metric", *names, *(f"{name} - {names[0]}" for name in names[1:])], rows)


def _plots(found: Evaluated, label: str) -> list[Plot]:
    """The plots of a label: curves of all models in one, scores of each model in its own."""
    names = [model.name for model in found.models]
    known = ~np.isnan(found.scored.labels[label])
    labels = found.scored.labels[label][known]
    weights = None if found.scored.weights is None else found.scored.weights[known]
    tables = found.results.calibration[label]
    scores = [own[label][known] for own in found.scored.scores]
    if found.results.overall[label].task == "regression":
        draw = partial(_draw_calibration, tables=tables, names=names)
        return [
            Plot(
                "Predictions",
                "Rows in 20 groups of equal size by prediction; on the line, predictions are right on"
                " average.",
                svg_of(f"mean prediction of {label}", "mean label", draw, size=_SIZE),
            )
        ]
    drawn = [curves(own, labels, weights) for own in scores]
    pairs = [(name, own) for name, own in zip(names, drawn, strict=True) if own is not None]
    plots = [
        Plot(
            "ROC curve",
            "How many positives stand above a threshold, by how many negatives do.",
            svg_of(
                f"false positive rate, {label}",
                "true positive rate",
                partial(_draw_roc, pairs=pairs),
                size=_SIZE,
            ),
        ),
        Plot(
            "Precision and recall",
            "The share of positives above a threshold, by how many of all positives stand there.",
            svg_of(
                f"recall, {label}",
                "precision",
                partial(
                    _draw_precision, pairs=pairs, rate=float(np.average(labels, weights=weights))
                ),
                size=_SIZE,
            ),
        ),
    ]
    if tables:
        plots += [
            Plot(
                "Calibration",
                "Rows in 20 groups of equal size by prediction; on the line, predictions are right on"
                " average. Bars: twice the standard error of a share of independent rows.",
                svg_of(
                    f"mean prediction of {label}",
                    "share of label 1",
                    partial(_draw_calibration, tables=tables, names=names),
                    size=_SIZE,
                ),
            ),
        ]
    for name, own in zip(names, scores, strict=True):
        draw = partial(_draw_scores, scores=own, labels=labels)
        title = f"Scores by label, {name}" if len(names) > 1 else "Scores by label"
        x_label = f"prediction of {label}" + (f", {name}" if len(names) > 1 else "")
        plots.append(
            Plot(
                title,
                "Each label's rows as a density.",
                svg_of(x_label, "density", draw, size=_SIZE),
            )
        )
    return plots


def _thinned(*arrays: Any) -> list[Any]:
    count = len(arrays[0])
    places = np.unique(np.linspace(0, count - 1, min(count, MOST_POINTS)).round().astype(int))
    return [array[places] for array in arrays]


def _colour(place: int) -> str:
    return _COLOURS[place % len(_COLOURS)]


def _draw_roc(axes: Axes, *, pairs: Sequence[tuple[str, Curves]]) -> None:
    axes.plot([0, 1], [0, 1], color=GREY, linestyle=":", label="by chance")
    for place, (name, own) in enumerate(pairs):
        x, y = _thinned(own.false_positive_rate, own.true_positive_rate)
        axes.plot(x, y, color=_colour(place), linewidth=1.5, label=name)


def _draw_precision(axes: Axes, *, pairs: Sequence[tuple[str, Curves]], rate: float) -> None:
    axes.axhline(rate, color=GREY, linestyle=":", label="by chance")
    for place, (name, own) in enumerate(pairs):
        x, y = _thinned(own.true_positive_rate, own.precision)
        axes.plot(x, y, color=_colour(place), linewidth=1.5, label=name)
    axes.set_ylim(0, 1.02)


def _draw_calibration(
    axes: Axes, *, tables: Sequence[CalibrationTable], names: Sequence[str]
) -> None:
    ends = [float(each) for table in tables for each in (*table.predicted, *table.observed)]
    low, high = min([0.0, *ends]), max([*ends, 1e-9])
    axes.plot([low, high], [low, high], color=GREY, linestyle=":", label="perfect")
    for place, (name, table) in enumerate(zip(names, tables, strict=True)):
        share = np.clip(table.observed, 0.0, 1.0)
        binary = bool(np.all(share == table.observed))
        error = 2 * np.sqrt(share * (1 - share) / table.rows) if binary else None
        style: dict[str, Any] = {"fmt": "o", "ms": 4, "lw": 1, "color": _colour(place)}
        axes.errorbar(table.predicted, table.observed, yerr=error, label=name, **style)


def _draw_scores(axes: Axes, *, scores: Any, labels: Any) -> None:
    edges = np.linspace(0.0, 1.0, HISTOGRAM_BINS + 1).tolist()
    for value, colour in ((0, BLUE), (1, ORANGE)):
        name = f"label {value}"
        axes.hist(
            scores[labels == value], edges, density=True, color=colour, alpha=0.55, label=name
        )


def _slices(found: Evaluated, label: str) -> list[tuple[Table, Plot | None]]:
    """For each column a table of its slices, and a plot of the metric that most look at."""
    names = [model.name for model in found.models]
    own = [part for part in found.results.slices if part.label == label]
    shown = []
    for column in dict.fromkeys(part.column for part in own):
        parts = [part for part in own if part.column == column]
        rows = []
        for part in parts:
            counts = [f"{part.rows:,} ({part.share:.1%})"]
            counts += [] if part.positives is None else [f"{part.positives:,}"]
            of_models = [(name, of, False) for name, of in zip(names, part.models, strict=True)]
            of_models += [
                (f"{name} - {names[0]}", of, True)
                for name, of in zip(names[1:], part.differences, strict=True)
            ]
            for name, of, sign in of_models:
                named = [name] if len(names) > 1 else []
                cells = [measured_text(measured, sign=sign) for measured in of.values()]
                rows.append([str(part.value), *named, *counts, *cells])
        head = [str(column), *(["model"] if len(names) > 1 else []), "rows"]
        head += [] if parts[0].positives is None else ["label 1"]
        head += [metric_name(metric) for metric in parts[0].models[0]]
        shown.append((Table(f"By {column}", head, rows), _slice_plot(parts, names, str(column))))
    return shown


def _slice_plot(parts: Sequence[Part], names: Sequence[str], column: str) -> Plot | None:
    metric = "auc" if parts[0].task == "binary" else "root_mean_squared_error"
    if all(math.isnan(own[metric].value) for part in parts for own in part.models):
        return None
    height = min(2.0 + 0.25 * len(parts) * len(names), 9.0)
    return Plot(
        f"{metric_name(metric)} by {column}",
        "Bars: twice the standard error. A slice without rows of both labels has no AUC."
        if metric == "auc"
        else "Bars: twice the standard error.",
        svg_of(
            f"{metric_name(metric)} of {parts[0].label}",
            column,
            partial(_draw_slices, parts=parts, names=names, metric=metric),
            size=(_SIZE[0], height),
            legend=len(names) > 1,
        ),
    )


def _short(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:23]}…"


def _draw_slices(axes: Axes, *, parts: Sequence[Part], names: Sequence[str], metric: str) -> None:
    places = np.arange(len(parts), dtype=np.float64)[::-1]
    for place, name in enumerate(names):
        values = np.array([part.models[place][metric].value for part in parts])
        errors = np.array([part.models[place][metric].standard_error for part in parts])
        shift = 0.3 * (place - (len(names) - 1) / 2) / max(1, len(names) - 1)
        style: dict[str, Any] = {"fmt": "o", "ms": 5, "lw": 1.2, "color": _colour(place)}
        axes.errorbar(values, places - shift, xerr=2 * np.nan_to_num(errors), label=name, **style)
    # A value of a column may hold signs that would be read as a formula.
    texts = [_short(str(part.value)).replace("$", r"\$") for part in parts]
    axes.set_yticks(places, texts)
    axes.set_ylim(-0.7, len(parts) - 0.3)
    axes.locator_params(axis="x", nbins=5)


def _importance(found: Evaluated, label: str) -> list[tuple[Table, Plot]]:
    shown = []
    for place, model in enumerate(found.models):
        own = [one for one in found.importance if (one.model, one.label) == (place, label)]
        if not own:
            continue
        metrics = list(own[0].losses)
        head = ["column", "features", *(f"{metric_name(metric)} worse by" for metric in metrics)]
        rows = [
            [
                one.column,
                ", ".join(one.features),
                *(measured_text(one.losses[m], sign=True) for m in metrics),
            ]
            for one in own
        ]
        title = f"Importance of columns for {model.name}"
        first = own[:MOST_BARS]
        plot = Plot(
            title,
            f"How much worse {metric_name(metrics[0])} is when a column's values go to other rows,"
            f" over {found.options.importance} shuffles. Bars: twice the standard error.",
            svg_of(
                f"loss of {metric_name(metrics[0])}, {label}, {model.name}",
                "column",
                partial(_draw_importance, found=first, metric=metrics[0]),
                size=(_SIZE[0], 1.2 + 0.24 * len(first)),
                legend=False,
            ),
        )
        shown.append((Table(title, head, rows), plot))
    return shown


def _draw_importance(axes: Axes, *, found: Sequence[Importance], metric: str) -> None:
    places = np.arange(len(found))[::-1]
    values = [one.losses[metric].value for one in found]
    errors = [2 * np.nan_to_num(one.losses[metric].standard_error) for one in found]
    axes.barh(places, values, xerr=errors, color=BLUE, ecolor=GREY, height=0.7)
    axes.set_yticks(places, [_short(one.column).replace("$", r"\$") for one in found])
    axes.margins(y=0.02)
    axes.locator_params(axis="x", nbins=5)
