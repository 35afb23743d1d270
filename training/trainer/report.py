"""The report of a run: one HTML file that needs nothing else, with plots as inline SVG."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import tessera
from tessera.training.trainer.metrics import BinaryMetrics, calibration_bins, sigmoid

CALIBRATION_BINS = 20
HISTOGRAM_BINS = 50
# Told apart by readers with any colour vision, and in print.
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#888888"

METRIC_NAMES = {
    "rows": "rows",
    "positives": "rows with label 1",
    "auc": "AUC",
    "normalised_entropy": "normalised entropy",
    "log_loss": "log loss",
    "calibration": "calibration (mean prediction / mean label)",
}


def render_report(
    *,
    config_yaml: str,
    rows: Sequence[Mapping[str, str]],
    final: Mapping[str, Any],
    metrics: Mapping[str, BinaryMetrics],
) -> str:
    """The report as HTML.

    Args:
        config_yaml: the resolved config.
        rows: the rows of ``metrics.csv``; see `tessera.training.trainer.logs.COLUMNS`.
        final: what goes into ``final.json``.
        metrics: the final passes by split (``valid`` and, if there are such rows, ``test``);
            the last one is plotted.
    """
    split, shown = list(metrics.items())[-1]
    groups_note = (
        f"Rows of the {split} split in {CALIBRATION_BINS} groups of equal size by prediction; on"
        " the line, predictions are right on average."
    )
    plots = [
        ("Loss", "Log loss by training step.", _loss_plot(rows, final)),
        ("AUC", "Area under the ROC curve on the validation rows.", _auc_plot(rows, final)),
        ("Calibration", groups_note, _calibration_plot(shown)),
        (
            "Scores by label",
            f"Predictions on the {split} split, each label's rows as a density.",
            _histogram_plot(shown),
        ),
    ]
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        (Path(__file__).parent / "report.html").read_text(encoding="utf-8")
    )
    splits = [name for name in ("valid", "test") if final[name] is not None]
    return template.render(
        version=tessera.__version__,
        final=final,
        splits=splits,
        table=[
            (label, [_number(final[name][key]) for name in splits])
            for key, label in METRIC_NAMES.items()
        ],
        plots=plots,
        config_yaml=config_yaml,
    )


def _number(value: float | None) -> str:
    if value is None:
        return "not defined"
    return f"{value:,}" if isinstance(value, int) else f"{value:.5f}"


def _column(
    rows: Sequence[Mapping[str, str]], split: str, name: str
) -> tuple[list[int], list[float]]:
    chosen = [row for row in rows if row["split"] == split]
    return [int(row["step"]) for row in chosen], [float(row[name]) for row in chosen]


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure, name: str) -> str:
    """The figure as an ``<svg>`` element; ``name`` keeps ids apart from other figures' ids."""
    stream = io.StringIO()
    with mpl.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}
    ):
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(stream, format="svg", metadata=no_metadata)
    text = stream.getvalue()
    return text[text.index("<svg") :]  # without the XML prolog, which HTML does not have


def _mark_best(axes: Axes, final: Mapping[str, Any]) -> None:
    axes.axvline(final["best_step"], color=GREY, linestyle=":", label="best checkpoint")
    axes.set_xlabel("step")
    axes.legend(frameon=False)


def _loss_plot(rows: Sequence[Mapping[str, str]], final: Mapping[str, Any]) -> str:
    figure, axes = _figure()
    axes.plot(*_column(rows, "train", "loss"), color=BLUE, linewidth=1.2, label="train")
    axes.plot(*_column(rows, "valid", "loss"), color=ORANGE, marker="o", ms=3, label="valid")
    axes.set_ylabel("log loss")
    _mark_best(axes, final)
    return _svg(figure, "loss")


def _auc_plot(rows: Sequence[Mapping[str, str]], final: Mapping[str, Any]) -> str:
    figure, axes = _figure()
    axes.plot(*_column(rows, "valid", "auc"), color=ORANGE, marker="o", ms=3, label="valid")
    axes.set_ylabel("AUC")
    _mark_best(axes, final)
    return _svg(figure, "auc")


def _calibration_plot(metrics: BinaryMetrics) -> str:
    figure, axes = _figure()
    bins = calibration_bins(metrics.logits, metrics.labels, bins=CALIBRATION_BINS)
    predicted = [part.mean_prediction for part in bins]
    seen = [part.mean_label for part in bins]
    # Twice the standard error of a share of n rows: where 95% of right groups would lie.
    error = [2 * math.sqrt(y * (1 - y) / part.rows) for y, part in zip(seen, bins, strict=True)]
    top = 1.05 * max([*predicted, *seen, 1e-9])
    axes.plot([0, top], [0, top], color=GREY, linestyle=":", label="perfect")
    axes.errorbar(predicted, seen, yerr=error, color=BLUE, fmt="o", ms=4, lw=1, label="model")
    axes.set_xlabel("mean prediction")
    axes.set_ylabel("share of label 1")
    axes.legend(frameon=False)
    return _svg(figure, "calibration")


def _histogram_plot(metrics: BinaryMetrics) -> str:
    figure, axes = _figure()
    scores = sigmoid(metrics.logits)
    edges = np.linspace(0.0, 1.0, HISTOGRAM_BINS + 1)
    for label, colour in ((0, BLUE), (1, ORANGE)):
        chosen = scores[metrics.labels == label]
        if len(chosen):
            axes.hist(
                chosen,
                edges.tolist(),
                density=True,
                color=colour,
                alpha=0.55,
                label=f"label {label}",
            )
    axes.set_xlabel("prediction")
    axes.set_ylabel("density")
    axes.legend(frameon=False)
    return _svg(figure, "histogram")
