"""The report of a run: one HTML file that needs nothing else, with plots as inline SVG."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
    auc_note = "Area under the ROC curve on the validation rows."
    scores_note = f"Predictions on the {split} split, each label's rows as a density."
    loss = partial(_draw_curves, rows=rows, final=final, column="loss", splits=("train", "valid"))
    auc = partial(_draw_curves, rows=rows, final=final, column="auc", splits=("valid",))
    calibration = partial(_draw_calibration, metrics=shown)
    histogram = partial(_draw_histogram, metrics=shown)
    plots = [
        ("Loss", "Log loss by training step.", _svg("step", "log loss", loss)),
        ("AUC", auc_note, _svg("step", "AUC", auc)),
        ("Calibration", groups_note, _svg("mean prediction", "share of label 1", calibration)),
        ("Scores by label", scores_note, _svg("prediction", "density", histogram)),
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


def _svg(x_label: str, y_label: str, draw: Callable[[Axes], None]) -> str:
    """What ``draw`` puts on axes with these labels, as an ``<svg>`` element."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    draw(axes)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend(frameon=False)
    stream = io.StringIO()
    with mpl.rc_context(
        # The salt keeps ids apart from those of the report's other figures.
        {"svg.fonttype": "none", "svg.hashsalt": y_label, "font.family": "sans-serif"}
    ):
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(stream, format="svg", metadata=no_metadata)
    text = stream.getvalue()
    return text[text.index("<svg") :]  # without the XML prolog, which HTML does not have


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
    rows, predicted, seen = calibration_bins(metrics.logits, metrics.labels, bins=CALIBRATION_BINS)
    # Twice the standard error of a share of n rows: where 95% of right groups would lie.
    error = 2 * np.sqrt(seen * (1 - seen) / rows)
    top = 1.05 * max([*predicted, *seen, 1e-9])
    axes.plot([0, top], [0, top], color=GREY, linestyle=":", label="perfect")
    axes.errorbar(predicted, seen, yerr=error, color=BLUE, fmt="o", ms=4, lw=1, label="model")


def _draw_histogram(axes: Axes, *, metrics: BinaryMetrics) -> None:
    scores = sigmoid(metrics.logits)
    edges = np.linspace(0.0, 1.0, HISTOGRAM_BINS + 1).tolist()
    for label, color in ((0, BLUE), (1, ORANGE)):
        chosen, name = scores[metrics.labels == label], f"label {label}"
        if len(chosen):
            axes.hist(chosen, edges, density=True, color=color, alpha=0.55, label=name)
