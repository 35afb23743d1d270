"""The report of a run: one HTML file that needs nothing else, with plots as inline SVG."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from tessera.plots import BLUE, GREY, ORANGE, svg_of
from tessera.report_page import render_page
from tessera.training.metrics.binary import calibration_table, sigmoid
from tessera.training.trainer.logs import training_time
from tessera.training.trainer.metrics import BinaryMetrics
from tessera.training.trainer.run_facts import RunFacts
from tessera.training.trainer.split_metrics import LabelMetrics, RegressionMetrics, SplitMetrics

CALIBRATION_BINS = 20
HISTOGRAM_BINS = 50

MOST_HEADLINES = 6
"""Metrics that stand in front of all others."""

COUNTS = ("rows", "positives", "queries")
"""What is counted beside the metrics."""

METRIC_NAMES = {
    "loss": "loss of all labels",
    "rows": "rows",
    "positives": "rows with label 1",
    "auc": "AUC",
    "normalised_entropy": "normalised entropy",
    "log_loss": "log loss",
    "mean_squared_error": "mean squared error",
    "root_mean_squared_error": "root mean squared error",
    "mean_absolute_error": "mean absolute error",
    "r_squared": "R squared",
    "calibration": "calibration (mean prediction / mean label)",
    "recall": "recall",
    "ndcg": "NDCG",
    "queries": "users, or rows, that were given items",
    "unknown_items": "share of the relevant items that no training row has",
}


def render_report(
    *,
    facts: RunFacts,
    folder: Path,
    config_yaml: str,
    rows: Sequence[Mapping[str, str]],
    final: Mapping[str, Any],
    metrics: Mapping[str, SplitMetrics],
) -> str:
    """The report as HTML.

    Args:
        facts: what is told beside the figures.
        folder: the run folder, as the commands that come next name it.
        config_yaml: the resolved config.
        rows: the rows of ``metrics.csv``; see `tessera.training.trainer.logs.COLUMNS`.
        final: what goes into ``final.json``.
        metrics: the final passes by split (``valid`` and, if there are such rows, ``test``);
            the last one is plotted, label by label.
    """
    split, shown = list(metrics.items())[-1]
    curves = [row for row in rows if not row.get("label")]  # of all labels together
    loss = partial(_draw_curves, rows=curves, final=final, column="loss", splits=("train", "valid"))
    auc = partial(_draw_curves, rows=curves, final=final, column="auc", splits=("valid",))
    auc_note = "Area under the ROC curve on the validation rows."
    binary = any(isinstance(own, BinaryMetrics) for own in shown.by_label.values())
    kind = "log loss" if binary and len(shown.by_label) == 1 else "loss"
    if shown.retrieval is not None:
        loss = partial(_draw_curves, rows=curves, final=final, column="loss", splits=("train",))
        recall = partial(_draw_curves, rows=curves, final=final, column="recall", splits=("valid",))
        of, kind = f"Recall@{shown.retrieval.k}", "loss"
        binary = not np.isnan(shown.compute().auc)
    plots = [
        ("Loss", f"{kind.capitalize()} by training step.", svg_of("step", kind, loss)),
        *([("AUC", auc_note, svg_of("step", "AUC", auc))] if binary else []),
    ]
    if shown.retrieval is not None:
        plots.append((of, f"{of} of all items on the validation rows.", svg_of("step", of, recall)))
    for label, own in shown.by_label.items() if shown.retrieval is None else ():
        name = f" of {label}" if len(shown.by_label) > 1 else ""
        plots += _plots_of_label(own, split, name)
    errors = {name: own.standard_errors() for name, own in metrics.items()}
    template = Path(__file__).parent / "report.html"
    splits = [name for name in ("valid", "test") if final[name] is not None]
    keys = sorted(final[splits[0]], key=_place_in_table)
    return render_page(
        template,
        facts=facts,
        headline_split=splits[-1],
        headlines=_headlines(keys, final[splits[-1]], errors.get(splits[-1], {})),
        duration=_duration(training_time(rows)[0]),
        changed=[
            (own.key, own.value, "must be given" if own.default is None else own.default)
            for own in facts.changed
        ],
        commands=next_commands(folder),
        final=final,
        continues=final.get("continues"),
        splits=splits,
        errors=bool(errors),
        clustered_by=final.get("errors_clustered_by"),
        rows=[
            [
                _metric_name(key),
                *(
                    _number(final[name][key], _error_of(errors.get(name, {}), key))
                    for name in splits
                ),
            ]
            for key in keys
        ],
        plots=plots,
        config_yaml=config_yaml,
    )


def next_commands(folder: Path) -> str:
    """The commands that package the run's best checkpoint and serve the package, a line each."""
    name = folder.resolve().name
    package = shlex.quote(f"{name}.pt")
    return "\n".join(
        [
            f"tessera package-model {shlex.quote(str(folder))} --out {package}",
            f"tessera serve --model {package}",
        ]
    )


def _headlines(
    keys: Sequence[str], found: Mapping[str, Any], errors: Mapping[str, Mapping[str, float]]
) -> list[tuple[str, str, str]]:
    """What each of the metrics is called that a reader looks for first, its value and its standard error."""
    chosen = [key for key in keys if key.rpartition(".")[2].partition("@")[0] not in COUNTS]
    shown = []
    for key in chosen[:MOST_HEADLINES]:
        error = _error_of(errors, key)
        text = "" if math.isnan(error) else f"{error:.5f}"
        shown.append((_metric_name(key), _number(found[key], math.nan), text))
    return shown


def _duration(seconds: float) -> str:
    """Seconds as a reader says them."""
    if seconds < 120:
        return f"{seconds:.1f} s of training"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min of training" if minutes < 120 else f"{hours:.1f} h of training"


def _plots_of_label(metrics: LabelMetrics, split: str, of: str) -> list[tuple[str, str, str]]:
    """Title, note and plot of how the predictions of a label lie."""
    groups_note = (
        f"Rows of the {split} split in {CALIBRATION_BINS} groups of equal size by prediction; on"
        " the line, predictions are right on average."
    )
    if not isinstance(metrics, BinaryMetrics):
        means = svg_of(f"mean prediction{of}", "mean label", partial(_draw_means, metrics=metrics))
        return [(f"Predictions{of}", groups_note, means)]
    scores_note = f"Predictions on the {split} split, each label's rows as a density."
    groups = partial(_draw_calibration, metrics=metrics)
    calibration = svg_of(f"mean prediction{of}", "share of label 1", groups)
    histogram = svg_of(f"prediction{of}", "density", partial(_draw_histogram, metrics=metrics))
    return [
        (f"Calibration{of}", groups_note, calibration),
        (f"Scores by label{of}", scores_note, histogram),
    ]


def _metric_name(key: str) -> str:
    """What the report calls a metric of ``final.json``, which may begin with a label's name."""
    label, _, metric = key.rpartition(".")
    name, at, k = metric.partition("@")
    name = f"{METRIC_NAMES[name]}{at}{k}"
    return f"{label}: {name}" if label else name


def _place_in_table(key: str) -> tuple[str, int]:
    label, _, metric = key.rpartition(".")
    return label, list(METRIC_NAMES).index(metric.partition("@")[0])


def _error_of(by_label: Mapping[str, Mapping[str, float]], key: str) -> float:
    """The standard error of a metric of ``final.json``; NaN where it has none."""
    label, _, metric = key.rpartition(".")
    if not label and len(by_label) > 1:
        return math.nan  # of all labels together
    own = by_label[label] if label else next(iter(by_label.values()), {})
    return own.get(metric, math.nan)


def _number(value: float | None, error: float) -> str:
    if value is None:
        return "not defined"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.5f}" if math.isnan(error) else f"{value:.5f} ± {error:.5f}"


def _draw_curves(
    axes: Axes,
    *,
    rows: Sequence[Mapping[str, str]],
    final: Mapping[str, Any],
    column: str,
    splits: Sequence[str],
) -> None:
    for split in splits:
        chosen = [row for row in rows if row["split"] == split]
        steps, values = [int(row["step"]) for row in chosen], [float(row[column]) for row in chosen]
        if split == "train":
            axes.plot(steps, values, color=BLUE, linewidth=1.2, label=split)
        else:
            axes.plot(steps, values, color=ORANGE, marker="o", ms=3, label=split)
    axes.axvline(final["best_step"], color=GREY, linestyle=":", label="best checkpoint")


def _draw_calibration(axes: Axes, *, metrics: BinaryMetrics) -> None:
    found = calibration_table(sigmoid(metrics.logits), metrics.labels, bins=CALIBRATION_BINS)
    rows, predicted, seen = found.rows, found.predicted, found.observed
    # Twice the standard error of a share of n rows: where 95% of right groups would lie.
    error = 2 * np.sqrt(seen * (1 - seen) / rows)
    top = 1.05 * max([*predicted, *seen, 1e-9])
    axes.plot([0, top], [0, top], color=GREY, linestyle=":", label="perfect")
    axes.errorbar(predicted, seen, yerr=error, color=BLUE, fmt="o", ms=4, lw=1, label="model")


def _draw_means(axes: Axes, *, metrics: RegressionMetrics) -> None:
    order = np.argsort(metrics.predictions, kind="stable")
    parts = [part for part in np.array_split(order, CALIBRATION_BINS) if len(part)]
    predicted = [float(metrics.predictions[part].mean()) for part in parts]
    seen = [float(metrics.labels[part].mean()) for part in parts]
    ends = [min([*predicted, *seen]), max([*predicted, *seen])]
    axes.plot(ends, ends, color=GREY, linestyle=":", label="perfect")
    axes.plot(predicted, seen, color=BLUE, marker="o", ms=4, linewidth=0, label="model")


def _draw_histogram(axes: Axes, *, metrics: BinaryMetrics) -> None:
    scores = sigmoid(metrics.logits)
    edges = np.linspace(0.0, 1.0, HISTOGRAM_BINS + 1).tolist()
    for label, color in ((0, BLUE), (1, ORANGE)):
        chosen, name = scores[metrics.labels == label], f"label {label}"
        if len(chosen):
            axes.hist(chosen, edges, density=True, color=color, alpha=0.55, label=name)
