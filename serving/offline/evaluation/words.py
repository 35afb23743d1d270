"""How numbers, metrics and the rows are called, on terminals and pages."""

from __future__ import annotations

import math

from tessera.serving.offline.evaluation.evaluate import Evaluated
from tessera.serving.offline.evaluation.results import Measured

_NAMES = {
    "auc": "AUC",
    "log_loss": "log loss",
    "normalised_entropy": "normalised entropy",
    "calibration": "calibration (predicted / observed)",
    "accuracy": "accuracy",
    "gauc": "GAUC",
    "mean_squared_error": "mean squared error",
    "root_mean_squared_error": "root mean squared error",
    "mean_absolute_error": "mean absolute error",
    "r_squared": "R squared",
}


def metric_name(metric: str) -> str:
    """What people call a metric."""
    if metric.startswith("ndcg@"):
        return metric.upper()
    return _NAMES.get(metric, metric)


def number(value: float, like: float = math.nan) -> str:
    """A number with 4 decimals, or with as many as show two digits of a standard error ``like``."""
    if math.isnan(value):
        return "n/a"
    if 0 < like < 1e-3:
        return f"{value:.{min(10, 1 - math.floor(math.log10(like)))}f}"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.5g}"


def measured_text(measured: Measured, *, sign: bool = False) -> str:
    """A metric and its standard error; with a sign where it is a difference."""
    value, error = measured.value, measured.standard_error
    if math.isnan(value):
        return "n/a"
    text = number(value, error)
    text = f"+{text}" if sign and value >= 0 else text
    return text if math.isnan(error) else f"{text} ± {number(error, error)}"


def about_rows(found: Evaluated) -> str:
    """One sentence or more on which rows these are, and what standard errors mean."""
    opened, scored = found.opened, found.scored
    where = ", ".join(opened.config.paths()) or opened.config.format
    split = "" if opened.split == "all" else f", split {opened.split}"
    parts = [f"{scored.rows:,} rows of {where}{split}"]
    if scored.rows < scored.available:
        parts.append(f"evenly spread over {scored.available:,}")
    if opened.malformed:
        parts.append(f"{opened.malformed:,} malformed rows left out")
    text = "; ".join(parts)
    if found.looks.weight is not None:
        text += f". Rows count as column {found.looks.weight} says"
    if found.looks.group is not None:
        text += f". Ranked within {found.results.groups:,} groups of {found.looks.group}"
    if found.looks.cluster is None:
        return f"{text}. After ±: standard errors, each row on its own."
    return (
        f"{text}. After ±: standard errors, clustered by {found.looks.cluster}"
        f" ({found.results.clusters:,} clusters)."
    )
