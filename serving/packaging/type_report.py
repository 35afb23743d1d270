"""What each weight type of tables and dense layers would cost and save: a report as HTML or text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tessera.errors import UserError
from tessera.report_page import render_page
from tessera.serving.inspect.summary import human_bytes, table_of
from tessera.serving.package.evaluation import Evaluation
from tessera.serving.package.manifest import TableInfo
from tessera.serving.package.replace import replacing
from tessera.serving.package.runner import Runner, TorchScriptRunner
from tessera.serving.package.schema import InputSchema
from tessera.serving.package.torchscript import optimize
from tessera.serving.packaging.dense_types import DENSE_TYPES
from tessera.serving.packaging.lookups.backends import lookup_backend
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.servable import ServableModel
from tessera.serving.packaging.write.golden import golden_batch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHOSEN = "as packaged"
SAME_TABLES = "the same tables"

Make = Callable[[PackageOptions], ServableModel]
Measure = Callable[[Runner, InputSchema], Evaluation | None]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to store the weights, what each table loses by it, and the metrics, if there are any.

    Attributes:
        name: a weight type for all tables, `CHOSEN`, or `SAME_TABLES` where only the dense layers differ
            from that.
        bytes: of all weights.
        largest_change: the largest difference of an output from the fp32 model's over the golden
            requests.
    """

    name: str
    dense: str
    bytes: int
    tables: tuple[TableInfo, ...]
    evaluation: Evaluation | None
    largest_change: float

    @property
    def worst(self) -> TableInfo:
        """The table with the largest relative error."""
        return max(self.tables, key=lambda table: table.relative_rmse)


@dataclass(frozen=True, kw_only=True)
class TypeReport:
    """All choices, the smallest first, and why types are missing among them."""

    model: str
    choices: tuple[Choice, ...]
    impossible: tuple[tuple[str, str], ...]

    @property
    def chosen(self) -> Choice:
        """What is packaged."""
        return next(choice for choice in self.choices if choice.name == CHOSEN)

    @property
    def exact(self) -> Choice:
        """What the others are compared with."""
        return next(c for c in self.choices if c.name == "fp32" and c.dense == "fp32")


def compare_types(options: PackageOptions, make: Make, measure: Measure) -> TypeReport:
    """Make the model once per weight type that the backend has, and as ``options`` say.

    Tables of one type come with dense layers in float32; the choice of ``options`` also with each
    other type of dense layers that it could have.  The models stay on one CPU: where tables lie
    changes neither bytes nor errors.

    Raises:
        UserError: ``options`` do not fit the model.
    """
    here = replace(options, shards=1, sharding="auto", table_sharding={}, plan=None)
    backend = lookup_backend(options.backend)

    def make_as(name: str, dense: str) -> ServableModel:
        if name in {CHOSEN, SAME_TABLES}:
            return make(replace(here, dense_dtype=dense))
        return make(
            replace(here, dtype=name, table_dtypes={}, max_table_error=None, dense_dtype=dense)
        )

    exact = make_as("fp32", "fp32")
    inputs = golden_batch(exact.schema)
    expected = _runner(exact).forward(inputs)
    wanted = [
        (CHOSEN, options.dense_dtype),
        *(
            (SAME_TABLES, dense)
            for dense in backend.dense_types
            if dense != options.dense_dtype and options.device in DENSE_TYPES[dense].devices
        ),
        *((name, "fp32") for name in backend.weight_types),
    ]
    choices, impossible = [], []
    for name, dense in wanted:
        try:
            servable = exact if name == "fp32" else make_as(name, dense)
        except UserError as error:
            if name == CHOSEN:
                raise
            impossible.append((name, str(error)))
            continue
        runner = _runner(servable)
        found = runner.forward(inputs)
        choices.append(
            Choice(
                name=name,
                dense=dense,
                bytes=servable.bytes_packaged,
                tables=tuple(table.info for table in servable.tables.tables),
                evaluation=measure(runner, servable.schema),
                largest_change=max(float((found[n] - v).abs().max()) for n, v in expected.items()),
            )
        )
    choices.sort(key=lambda choice: (choice.bytes, choice.name))
    return TypeReport(model=options.name, choices=tuple(choices), impossible=tuple(impossible))


def _runner(servable: ServableModel) -> Runner:
    return TorchScriptRunner(optimize(servable.scripted))


HEAD = (
    "tables as",
    "dense as",
    "weights",
    "of fp32",
    "worst relative rmse",
    "in table",
    "AUC",
    "NE",
    "change of NE",
    "log loss",
    "largest change",
)


def _rows(report: TypeReport) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for choice in report.choices:
        quality = before = after = None
        if choice.evaluation is not None:
            quality = choice.evaluation.packaged
            before, after = choice.evaluation.fp32.normalised_entropy, quality.normalised_entropy
        change = None if before is None or after is None else after - before
        rows.append(
            (
                choice.name,
                choice.dense,
                human_bytes(choice.bytes),
                f"{choice.bytes / report.exact.bytes:.1%}",
                f"{choice.worst.relative_rmse:.3%}",
                choice.worst.name,
                _number(None if quality is None else quality.auc),
                _number(after),
                "-" if change is None else f"{change:+.6f}",
                _number(None if quality is None else quality.log_loss),
                f"{choice.largest_change:.2g}",
            )
        )
    return rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"


_TABLE_HEAD = ("table", "rows", "dim", "stored as", "size", "relative rmse")


def _table_rows(report: TypeReport) -> list[tuple[str, ...]]:
    tables = sorted(report.chosen.tables, key=lambda table: table.relative_rmse, reverse=True)
    return [
        (t.name, str(t.rows), str(t.dim), t.dtype, human_bytes(t.bytes), f"{t.relative_rmse:.3%}")
        for t in tables
    ]


def _about(report: TypeReport) -> str:
    measured = report.chosen.evaluation
    rows = f"{measured.rows} validation rows" if measured else "no validation rows were measured"
    alone = [
        f"{name} {output} AUC {_number(metrics['auc'])}"
        for name, by_output in (measured.members if measured else {}).items()
        for output, metrics in by_output.items()
        if "auc" in metrics
    ]
    members = f"members alone, in fp32: {', '.join(alone)}; " if alone else ""
    return (
        f"model {report.model}; {rows}; {members}the largest change of an output is over the package's "
        "golden requests, against tables and dense layers in fp32"
    )


def as_text(report: TypeReport) -> str:
    """The report for a terminal or a log."""
    lines = [_about(report), "", *table_of(HEAD, _rows(report)), ""]
    lines += [f"{name}: not possible: {why}" for name, why in report.impossible]
    lines += ["tables as packaged:", *table_of(_TABLE_HEAD, _table_rows(report))]
    return "\n".join(lines) + "\n"


def as_html(report: TypeReport) -> str:
    """The report as one HTML file that needs nothing else."""
    return render_page(
        Path(__file__).parent / "type_report.html",
        model=report.model,
        about=_about(report),
        chosen=CHOSEN,
        head=HEAD,
        rows=_rows(report),
        impossible=report.impossible,
        table_head=_TABLE_HEAD,
        tables=_table_rows(report),
        plots=_plots(report.choices),
    )


def check_place(path: Path) -> None:
    """Refuse a place where no report can be written, before the long way to it."""
    if path.exists() and not path.is_file():
        raise UserError(f"--report {path} exists and is not a file; name another")
    if not path.parent.is_dir():
        raise UserError(f"--report {path}: the folder {path.parent} does not exist; make it first")


def write_report(report: TypeReport, path: Path) -> None:
    """Write HTML where the name ends in ``.html`` or ``.htm``, text otherwise."""
    html = path.suffix.lower() in {".html", ".htm"}
    with replacing(path) as draft:
        draft.write_text(as_html(report) if html else as_text(report), encoding="utf-8")


def _plots(choices: Sequence[Choice]) -> list[str]:
    """The bytes and the worst table's error of each choice, as two ``<svg>`` elements with a row for each choice."""
    # Slow to import, and a package is rarely made with a report.
    from tessera.plots import BLUE, ORANGE, SIZE, svg_of  # noqa: PLC0415

    names = [f"{c.name}, dense {c.dense}" for c in choices]
    colours = [ORANGE if choice.name == CHOSEN else BLUE for choice in choices]
    height = 1.0 + 0.27 * len(choices)

    def bars(label: str, values: Sequence[float], text: str) -> str:
        def draw(axes: Axes) -> None:
            places = range(len(values))
            drawn = axes.barh(places, values, color=colours, height=0.65)
            axes.bar_label(drawn, [text.format(value) for value in values], padding=3)
            axes.set_yticks(places, names)
            axes.invert_yaxis()  # in the order of the table
            axes.margins(x=0.22, y=0.02)
            axes.set_xlim(left=0)

        return svg_of(label, "", draw, size=(SIZE[0], height), legend=False)

    return [
        bars("weights, MiB", [c.bytes / 2**20 for c in choices], "{:.3g}"),
        bars(
            "worst relative RMSE of a table, %",
            [100 * c.worst.relative_rmse for c in choices],
            "{:.2g}",
        ),
    ]
