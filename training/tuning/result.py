"""What a search gives: best.yaml, trials.csv, a table for the terminal and report.html."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from tessera.plots import BLUE, GREY, ORANGE, short, svg_of
from tessera.report_page import render_page
from tessera.training.config import load_config
from tessera.training.tuning.settings import Search, SearchFolder
from tessera.training.tuning.space import Dimension, Value
from tessera.training.tuning.study import Study, TrialRecord, best_of

SHOWN = 10
"""Trials in the table for the terminal."""


def write_result(folder: SearchFolder, search: Search, study: Study, *, report: bool) -> None:
    """Write what is known so far; the report, which takes seconds, only if asked."""
    records = study.records()
    folder.write(folder.table, _csv(records, search))
    best = best_of(records, search)
    if best is not None:
        folder.write(folder.best, best_config(folder, search, best))
    if report:
        page = render_report(records, search, study.importances(), name=folder.root.resolve().name)
        folder.write(folder.report, page)


def best_config(folder: SearchFolder, search: Search, best: TrialRecord) -> str:
    """The whole config of the best trial, with the ``run`` section that the search was given."""
    config = load_config(folder.trial(best.number) / "config.yaml")
    given = search.config(folder.base).run
    head = (
        f"# The best of {folder.root.name}: trial {best.number}, {search.metric.text}"
        f" {best.value:.6g}.\n"
    )
    return head + dataclasses.replace(config, run=given).to_yaml()


def _ranked(records: Sequence[TrialRecord], search: Search) -> list[TrialRecord]:
    """The complete trials, the best first."""
    complete = [record for record in records if record.state == "complete"]
    sign = -1.0 if search.metric.direction == "maximize" else 1.0
    return sorted(complete, key=lambda own: sign * (own.value or 0.0))


def _row(record: TrialRecord, search: Search) -> list[str]:
    value = "" if record.value is None else f"{record.value:.6g}"
    values = [_text(record.values.get(own.key)) for own in search.space]
    return [str(record.number), record.state, value, f"{record.seconds:.1f}", *values]


def _header(search: Search) -> list[str]:
    return ["trial", "state", search.metric.text, "seconds", *(own.key for own in search.space)]


def _text(value: Value | None) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _csv(records: Sequence[TrialRecord], search: Search) -> str:
    stream = io.StringIO(newline="")
    writer = csv.writer(stream)
    writer.writerow([*_header(search), "reason"])
    for record in records:
        exact = [str(record.values.get(own.key, "")) for own in search.space]
        value = "" if record.value is None else repr(record.value)
        row = [str(record.number), record.state, value, f"{record.seconds:.1f}", *exact]
        writer.writerow([*row, record.reason])
    return stream.getvalue()


def terminal_table(records: Sequence[TrialRecord], search: Search) -> str:
    """The best trials, and how many there are of each state."""
    shown = [_header(search), *(_row(own, search) for own in _ranked(records, search)[:SHOWN])]
    widths = [max(len(row[place]) for row in shown) for place in range(len(shown[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]
    counts = {state: sum(own.state == state for own in records) for state in _STATES}
    lines.append(", ".join(f"{count} {state}" for state, count in counts.items() if count))
    return "\n".join(lines)


_STATES = ("complete", "pruned", "failed", "running")


def render_report(
    records: Sequence[TrialRecord],
    search: Search,
    importances: Mapping[str, float],
    *,
    name: str,
) -> str:
    """The report as HTML that needs nothing else.

    Args:
        records: the trials.
        search: what was searched.
        importances: by key; see `Study.importances`.
        name: of the search's folder.
    """
    ranked = _ranked(records, search)
    plots: list[tuple[str, str, str]] = []
    if ranked:
        metric = search.metric.text
        history = partial(_draw_history, records=records, search=search)
        parallel = partial(_draw_parallel, ranked=ranked, search=search)
        plots = [
            (
                "History",
                "Each complete trial, and the best so far.",
                svg_of("trial", metric, history),
            ),
            (
                "All keys at once",
                "A line for each complete trial, from its values to its metric; the better, the stronger.",
                svg_of("key", "from low to high", parallel, legend=False),
            ),
        ]
        if importances:
            bars = partial(_draw_importances, importances=importances)
            note = "Share of each key in what makes a trial one of the best (PED-ANOVA)."
            plots.append(("Importance", note, svg_of("share", "", bars, legend=False)))
        plots += [
            (
                own.key,
                f"{metric} by {own.key}.",
                svg_of(short(own.key, 40), metric, partial(_draw_slice, own=own, ranked=ranked)),
            )
            for own in search.space
        ]
    template = Path(__file__).parent / "report.html"
    others = [record for record in records if record.state != "complete"]
    return render_page(
        template,
        search=search,
        name=name,
        best=ranked[0] if ranked else None,
        chosen=[(own.key, _text(ranked[0].values.get(own.key))) for own in search.space]
        if ranked
        else [],
        counts={state: sum(own.state == state for own in records) for state in _STATES},
        header=[*_header(search), "reason"],
        rows=[[*_row(own, search), own.reason] for own in [*ranked, *others]],
        plots=plots,
    )


def _draw_history(axes: Axes, *, records: Sequence[TrialRecord], search: Search) -> None:
    complete = [record for record in records if record.state == "complete"]
    values = np.array([record.value for record in complete], dtype=np.float64)
    numbers = [record.number for record in complete]
    upwards = search.metric.direction == "maximize"
    best = np.maximum.accumulate(values) if upwards else np.minimum.accumulate(values)
    axes.plot(numbers, values, color=BLUE, marker="o", ms=4, linewidth=0, label="trial")
    axes.step(numbers, best, color=ORANGE, where="post", linewidth=1.2, label="best so far")


def _draw_importances(axes: Axes, *, importances: Mapping[str, float]) -> None:
    keys = list(importances)[::-1]
    places = range(len(keys))
    axes.barh(places, [importances[key] for key in keys], color=BLUE, height=0.6)
    # The end of a key tells more than its beginning, and there is not room for all of a long one.
    axes.set_yticks(places, [short(".".join(key.split(".")[-2:])) for key in keys])


def _draw_slice(axes: Axes, *, own: Dimension, ranked: Sequence[TrialRecord]) -> None:
    if own.is_log:
        axes.set_xscale("log")
    places = [_place(own, record.values[own.key], scaled=False) for record in ranked]
    if own.choices:
        axes.set_xticks(range(len(own.choices)), own.choices)
    values = [float(record.value or 0.0) for record in ranked]
    axes.plot(places, values, color=BLUE, marker="o", ms=4, linewidth=0, label="trial")
    axes.plot(places[:1], values[:1], color=ORANGE, marker="o", ms=7, linewidth=0, label="best")


def _place(own: Dimension, value: Value, *, scaled: bool) -> float:
    """Where a value stands on an axis; ``scaled`` from 0 to 1."""
    if own.choices:
        place = own.choices.index(str(value))
        return place / (len(own.choices) - 1) if scaled else float(place)
    number, (low, high) = float(value), own.bounds
    if not scaled:
        return number
    if own.is_log:
        number, low, high = np.log(number), np.log(low), np.log(high)
    return float((number - low) / (high - low))


def _draw_parallel(axes: Axes, *, ranked: Sequence[TrialRecord], search: Search) -> None:
    values = [float(record.value or 0.0) for record in ranked]
    low, high = min(values), max(values)
    for rank, record in reversed(list(enumerate(ranked))):
        places = [_place(own, record.values[own.key], scaled=True) for own in search.space]
        height = (float(record.value or 0.0) - low) / (high - low) if high > low else 0.5
        worse = rank / max(1, len(ranked) - 1)
        look: dict[str, Any] = {"color": BLUE, "alpha": 1.0 - 0.85 * worse, "linewidth": 1.0}
        if rank == 0:
            look = {"color": ORANGE, "linewidth": 2.0}
        axes.plot(range(len(places) + 1), [*places, height], **look)
    names = [*(own.key.rpartition(".")[2] for own in search.space), search.metric.text]
    shown = [short(name, 22) for name in names]
    axes.set_xticks(range(len(names)), shown, rotation=25, ha="right")
    for place in range(len(names)):
        axes.axvline(place, color=GREY, linewidth=0.8)
    axes.set_ylim(-0.05, 1.05)
