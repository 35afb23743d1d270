"""`Comparison`: what differs between runs, as text, CSV and HTML."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes

from tessera.plots import PALETTE, short, svg_of
from tessera.report_page import render_page
from tessera.training.comparison.runs import RunSummary

BARS = "▁▂▃▄▅▆▇█"
MOST_BARS = 24
COLUMNS_UP_TO = 4
"""Up to so many runs are columns on a terminal; more are rows."""


class Comparison:
    """Runs side by side.

    Args:
        runs: two or more.
    """

    def __init__(self, runs: Sequence[RunSummary]) -> None:
        self.runs = list(runs)

    def differing_keys(self) -> list[str]:
        """The config keys whose values are not the same in all runs, in the order of the first."""
        keys = dict.fromkeys(key for run in self.runs for key in run.config)
        return [key for key in keys if len({run.config.get(key) for run in self.runs}) > 1]

    def notes(self) -> list[str]:
        """What a reader of the metrics must know: runs whose rows are others, or not known."""
        found = []
        first = next((run for run in self.runs if run.data), None)
        for run in self.runs:
            if run.status != "finished":
                found.append(
                    f"{run.name} is unfinished: its metrics are those of its latest evaluation"
                )
            elif not run.data:
                found.append(
                    f"{run.name} does not say which rows it was evaluated on: it was made before"
                    " that was written down"
                )
            elif first is not None:
                others = [name for name in first.data if run.data.get(name) != first.data[name]]
                if others:
                    found.append(
                        f"not comparable: {run.name} was evaluated on other rows or labels than"
                        f" {first.name} ({' and '.join(others)})"
                    )
        comparable = [run for run in self.runs if first is not None and run.data == first.data]
        if len(comparable) > 1:
            names = " ".join(run.name for run in comparable[:4])
            found.append(
                "whether differences are more than chance, paired standard errors say: tessera"
                f" evaluate {names}"
            )
        return found

    def header(self) -> list[str]:
        """What the cells of a run are called."""
        return [*self.differing_keys(), *self._metrics(), *_FACTS]

    def _metrics(self) -> list[str]:
        return list(dict.fromkeys(name for run in self.runs for name in run.metrics))

    def cells(self, run: RunSummary, *, exact: bool) -> list[str]:
        """A run's cells, in the order of `header`; ``exact`` with all digits of floats."""
        keys = [run.config.get(key, "") for key in self.differing_keys()]
        metrics = [_number(run.metrics.get(name), exact=exact) for name in self._metrics()]
        facts = (run.parameters, run.samples_per_second, run.seconds, run.best_step, run.status)
        return [*keys, *metrics, *(_number(fact, exact=exact) for fact in facts)]

    def text(self) -> str:
        """The table, a small curve of each run, and the notes."""
        name, curves = self._bars()
        header = ["run", *self.header(), *([name] if curves else [])]
        table = [
            [run.name, *self.cells(run, exact=False), *curves[place : place + 1]]
            for place, run in enumerate(self.runs)
        ]
        rows = [header, *table]
        if len(self.runs) <= COLUMNS_UP_TO:
            rows = [list(column) for column in zip(*rows, strict=True)]
        widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes())])

    def csv(self) -> str:
        """A line for each run, with the notes that concern it."""
        stream = io.StringIO(newline="")
        writer = csv.writer(stream)
        writer.writerow(["run", *self.header(), "data"])
        for run in self.runs:
            data = " ".join(f"{split}:{text}" for split, text in run.data.items())
            writer.writerow([run.name, *self.cells(run, exact=True), data])
        return stream.getvalue()

    def html(self) -> str:
        """The table and the runs' curves over one another, as a page that needs nothing else."""
        plots = []
        for name, title in _CURVES.items():
            if any(name in run.curves for run in self.runs):
                draw = partial(_draw, runs=self.runs, name=name)
                plots.append((title, svg_of("samples", title, draw)))
        template = Path(__file__).parent / "comparison.html"
        return render_page(
            template,
            header=["run", *self.header()],
            rows=[[run.name, *self.cells(run, exact=False)] for run in self.runs],
            notes=self.notes(),
            plots=plots,
        )

    def _bars(self) -> tuple[str, list[str]]:
        """The name of the curve that most runs have, and each run's drawn with letters."""
        have = {name: sum(name in run.curves for run in self.runs) for name in _CURVES}
        name = max(("valid.auc", "valid.loss"), key=lambda own: have[own])
        if not have[name]:
            return "", []
        drawn = [run.curves[name].values if name in run.curves else () for run in self.runs]
        known = [value for values in drawn for value in values if math.isfinite(value)]
        low, high = min(known, default=0.0), max(known, default=0.0)
        return f"{name} by evaluation", [_bars_of(values, low, high) for values in drawn]


_FACTS = ("parameters", "samples/s", "training s", "best step", "status")
_CURVES = {
    "train.loss": "training loss",
    "valid.loss": "validation loss",
    "valid.auc": "validation AUC",
}


def _number(value: float | str | None, *, exact: bool) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return repr(value) if exact else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) and not exact else str(value)


def _bars_of(values: Sequence[float], low: float, high: float) -> str:
    """A curve as a bar for each value, or for the last of every few."""
    step = max(1, math.ceil(len(values) / MOST_BARS))
    shown = [values[min(place + step, len(values)) - 1] for place in range(0, len(values), step)]
    span = (high - low) or 1.0
    places = [
        round((value - low) / span * (len(BARS) - 1)) if math.isfinite(value) else None
        for value in shown
    ]
    return "".join(" " if place is None else BARS[place] for place in places)


def _draw(axes: Axes, *, runs: Sequence[RunSummary], name: str) -> None:
    for place, run in enumerate(runs):
        curve = run.curves.get(name)
        if curve is not None:
            style = ("-", "--", ":", "-.")[place // len(PALETTE) % 4]
            axes.plot(
                curve.samples,
                curve.values,
                color=PALETTE[place % len(PALETTE)],
                linestyle=style,
                linewidth=1.2,
                marker="o" if name.startswith("valid") else None,
                ms=3,
                label=short(run.name),
            )
