"""The choice of the tables' types, and the report about it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tessera.cli import main
from tessera.errors import UserError
from tessera.kernels.row_types import ROW_TYPES
from tessera.serving import package_model
from tessera.serving.package.loading import load_package
from tessera.serving.packaging.lookups.backends import lookup_backend
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.serving.packaging.ranking import ranking_source
from tessera.serving.packaging.servable import make_servable
from tessera.serving.packaging.tables.choose_types import TypeChoice, choose_types
from tessera.serving.packaging.tables.quantize import FloatTable, measure
from tessera.serving.packaging.type_report import (
    CHOSEN,
    SAME_TABLES,
    as_html,
    as_text,
    compare_types,
)
from tests.package_factory import FEATURES, make_model
from tests.packaging import user_models
from tests.packaging.backends import EACH_BACKEND


def table(name: str, *, dim: int = 8, spread: float = 1.0) -> FloatTable:
    generator = torch.Generator().manual_seed(len(name))
    weights = torch.randn(20, dim, generator=generator)
    weights[:, 0] *= spread
    return FloatTable(name=name, weights=weights)


def names(tables: list[FloatTable], **choices: object) -> dict[str, str]:
    return {n: kind.name for n, kind in choose_types(tables, TypeChoice(**choices)).items()}


def test_the_first_pattern_that_fits_counts() -> None:
    tables = [table("user_id"), table("user_city"), table("item")]
    patterns = {"user_city": "fp16", "user_*": "int4"}
    assert names(tables, default="int8", by_pattern=patterns) == {
        "user_id": "int4",
        "user_city": "fp16",
        "item": "int8",
    }
    with pytest.raises(UserError, match="'x_\\*' fits no table; the tables are user_id, user_city"):
        names(tables, by_pattern={"x_*": "int4"})
    with pytest.raises(UserError, match="dtype 'int5' is unknown"):
        TypeChoice(by_pattern={"*": "int5"})
    with pytest.raises(UserError, match="max_table_error is 0; give a share"):
        TypeChoice(max_error=0)


def test_a_table_that_loses_too_much_takes_the_narrowest_type_that_does_not() -> None:
    # One column far larger than the others leaves these few codes.
    tables = [table("even"), table("uneven", spread=1e3)]
    losses = {
        kind: [measure(one, ROW_TYPES[kind]).relative_rmse for one in tables]
        for kind in ("int4", "int8", "fp16", "fp32")
    }
    bound = (losses["int8"][1] + losses["fp16"][1]) / 2
    assert losses["int8"][0] > bound > losses["fp16"][0]
    assert names(tables, default="int4", max_error=bound) == {"even": "fp16", "uneven": "fp16"}
    assert names(tables, default="int4", max_error=1.0) == {"even": "int4", "uneven": "int4"}
    assert names(tables, default="int4", max_error=1e-9) == {"even": "fp32", "uneven": "fp32"}
    # A width that the narrow type cannot hold does not stop the search for a wider one.
    odd = [table("odd", dim=7)]
    assert names(odd, default="int8", max_error=1e-4) == {"odd": "fp32"}


def test_a_type_that_the_backend_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(UserError, match="'int2' cannot be looked up by the tessera backend, which"):
        PackageOptions(name="m", dtype="int2", backend="tessera")
    with pytest.raises(
        UserError, match="'fp8' cannot be looked up by the fbgemm backend, which ha"
    ):
        PackageOptions(name="m", table_dtypes={"*": "fp8"}, backend="fbgemm")


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_a_package_of_mixed_types_says_so_and_loads(backend: str, tmp_path: Path) -> None:
    model = make_model()
    narrow = "fp8" if backend == "tessera" else "int2"
    types = {"item_table": "int4", "t_genre": narrow, "t_region": "fp32"}
    options = PackageOptions(name="m", backend=backend, table_dtypes=types)
    manifest = write_model(model, tmp_path / "m.pt", options)
    assert manifest.dtype == "mixed"
    found = {info.name: info for info in manifest.tables}
    assert {name: info.dtype for name, info in found.items() if info.dtype != "int8"} == types
    assert found["t_region"].max_abs_error == 0
    load_package(tmp_path / "m.pt")


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_the_report_has_every_type_of_the_backend(backend: str) -> None:
    model = make_model(features=FEATURES)
    options = PackageOptions(name="ads", backend=backend, table_dtypes={"item_table": "fp16"})
    report = compare_types(
        options, lambda o: make_servable(ranking_source(model), o), lambda *_: None
    )
    choices = {choice.name: choice for choice in report.choices}
    impossible = {name for name, _ in report.impossible}
    others = {SAME_TABLES} if len(lookup_backend(backend).dense_types) > 1 else set()
    types = lookup_backend(backend).weight_types
    assert choices.keys() | impossible == {CHOSEN, *others, *types}
    assert impossible <= {"int8b"}  # the model's dimensions are not multiples of 16
    assert [c.bytes for c in report.choices] == sorted(c.bytes for c in report.choices)
    assert choices["fp32"].largest_change == 0
    assert choices["int4"].largest_change > choices["int8"].largest_change > 0
    assert {t.dtype for t in report.chosen.tables} == {"int8", "fp16"}
    text, html = as_text(report), as_html(report)
    assert html.startswith("<!DOCTYPE html>")
    for choice in report.choices:
        assert re.search(
            rf"^  {choice.name} .* {choice.worst.relative_rmse:.3%}", text, re.MULTILINE
        )
        assert f"<td>{choice.name}</td>" in html
    assert "item_table" in html
    assert "http" not in html.replace("http://www.w3.org/", "")


def test_types_that_the_widths_forbid_are_listed_with_the_reason() -> None:
    model = make_model(arch="dlrm_dcn", dim=7)
    report = compare_types(
        PackageOptions(name="m"), lambda o: make_servable(ranking_source(model), o), lambda *_: None
    )
    assert "int4" not in [choice.name for choice in report.choices]
    assert dict(report.impossible)["int4"].startswith("table 't_user' has dimension 7; int4 needs")
    assert "int4 is not possible" in as_html(report)
    assert "int4: not possible" in as_text(report)


def test_the_command_line_takes_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = tmp_path / "m.pt", tmp_path / "types.txt"
    arguments = [
        "--factory",
        "tests.packaging.user_models:dcn",
        "--out",
        str(out),
        "--report",
        str(report),
    ]
    arguments += ["--table-dtype", "a=fp16", "--dtype", "int4", "--max-table-error", "0.05"]
    assert main(["package-model", *arguments]) == 0
    assert "tables mixed" in capsys.readouterr().out
    types = {info.name: info.dtype for info in load_package(out).manifest.tables}
    # The narrow table b keeps within the bound.
    assert types == {"a": "fp16", "b": "int4", "c": "int8"}
    assert "no validation rows were measured" in report.read_text()
    arguments[5] = str(tmp_path / "none" / "types.html")
    assert main(["package-model", *arguments]) == 2
    assert "--report" in capsys.readouterr().err


def test_the_api_writes_the_report(tmp_path: Path) -> None:
    report = tmp_path / "types.html"
    package_model(*user_models.wide(), out=tmp_path / "m.pt", report=report)
    assert "How the weights could be stored" in report.read_text()
