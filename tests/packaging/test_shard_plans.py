"""Where the tables' pieces go: the planner, and plans of the user's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tessera.cli import main
from tessera.errors import UserError
from tessera.kernels.libraries import LibraryError, library_path
from tessera.kernels.row_types import ROW_TYPES
from tessera.serving import package_model
from tessera.serving.package.loading import load_package
from tessera.serving.package.manifest import Placement, ShardingPlan
from tessera.serving.packaging.tables.quantize import FloatTable
from tessera.serving.packaging.tables.shard import check_plan, plan_shards, read_plan
from tests.packaging import user_models
from tests.packaging.batches import random_batch


def _built() -> bool:
    try:
        return bool(library_path("tessera_ops"))
    except LibraryError:
        return False


pytestmark = pytest.mark.skipif(not _built(), reason="the operators are not built (make build)")


def table(name: str, rows: int, dim: int = 8) -> FloatTable:
    return FloatTable(name=name, weights=torch.zeros(rows, dim))


def placed(placements: tuple[Placement, ...]) -> list[tuple]:
    return [
        (p.table, p.shard, (p.row_begin, p.row_end), (p.column_begin, p.column_end))
        for p in placements
    ]


def plan_of(tables: list[FloatTable], **choices: object) -> list[tuple]:
    types = {one.name: ROW_TYPES["int8"] for one in tables}
    return placed(plan_shards(tables, types, **choices).placements)


def test_whole_tables_go_to_the_emptiest_shard_the_largest_first() -> None:
    tables = [table("a", 10), table("b", 40), table("c", 35), table("d", 20)]
    assert plan_of(tables, shards=2, sharding="table_wise") == [
        ("a", 0, (0, 10), (0, 8)),
        ("b", 0, (0, 40), (0, 8)),
        ("c", 1, (0, 35), (0, 8)),
        ("d", 1, (0, 20), (0, 8)),
    ]


def test_auto_cuts_what_is_larger_than_a_shards_part() -> None:
    tables = [table("small", 10), table("large", 90), table("other", 20)]
    assert plan_of(tables, shards=2) == [
        ("small", 1, (0, 10), (0, 8)),
        ("large", 0, (0, 45), (0, 8)),
        ("large", 1, (45, 90), (0, 8)),
        ("other", 0, (0, 20), (0, 8)),
    ]
    assert {way for _, way, _, _ in plan_of(tables, shards=1)} == {0}


def test_cuts_are_even_and_whole_bytes() -> None:
    assert [rows for _, _, rows, _ in plan_of([table("t", 10)], shards=3, sharding="row_wise")] == [
        (0, 3),
        (3, 6),
        (6, 10),
    ]
    int4 = {"t": ROW_TYPES["int4"]}
    plan = plan_shards([table("t", 5, 10)], int4, shards=3, sharding="column_wise")
    assert [columns for _, _, _, columns in placed(plan.placements)] == [(0, 2), (2, 6), (6, 10)]


def test_a_pattern_decides_for_its_tables() -> None:
    tables = [table("user_a", 10), table("item_a", 10), table("item_b", 10)]
    found = plan_of(
        tables,
        shards=2,
        sharding="table_wise",
        by_pattern={"item_a": "row_wise", "item_*": "column_wise"},
    )
    assert [(name, shard) for name, shard, _, _ in found] == [
        ("user_a", 0),
        ("item_a", 0),
        ("item_a", 1),
        ("item_b", 0),
        ("item_b", 1),
    ]
    with pytest.raises(UserError, match="'x' fits no table; the tables are user_a, item_a, item_b"):
        plan_of(tables, shards=2, by_pattern={"x": "row_wise"})


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        ("table_wise", "shard 1 would hold nothing"),
        ("row_wise", "2 rows and 1 columns, too few to be cut by rows for 3 shards"),
        ("column_wise", "too few to be cut by columns for 3 shards"),
    ],
)
def test_tables_that_are_too_few_or_too_small_are_refused(sharding: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_of([table("t", 2, 1)], shards=3, sharding=sharding)


def test_a_plan_of_the_users_own_is_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, inputs, sample = user_models.tutorial()
    first = package_model(
        module, inputs, sample, out=tmp_path / "one.pt", shards=2, sharding="column_wise"
    )
    plan = first.to_json()["plan"]
    for placement in plan["placements"]:
        # 16 columns here and 48 there, the other way round than the planner has it.
        left = placement["column_begin"] == 0
        placement["shard"] = 1 if left else 0
        placement["column_begin"], placement["column_end"] = (0, 16) if left else (16, 64)
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    out = tmp_path / "own.pt"
    arguments = ["--factory", "tests.packaging.user_models:tutorial", "--out", str(out)]
    arguments += ["--plan", str(tmp_path / "plan.json")]
    assert main(["package-model", *arguments]) == 0
    own = load_package(out)
    found = {(p.table, p.shard, p.column_begin) for p in own.manifest.plan.placements}
    assert found == {
        (t, s, 0 if s else 16) for t in ("product_table", "user_table") for s in (0, 1)
    }
    batch = random_batch(own.manifest.schema, 20, max_length=5, seed=0)
    one = load_package(tmp_path / "one.pt").runner.forward(batch)
    for output, value in own.runner.forward(batch).items():
        assert torch.equal(value, one[output])
    assert main(["package-model", *arguments, "--shards", "2"]) == 2
    assert "either a plan or shards" in capsys.readouterr().err


def piece(table: str, shard: int, rows: tuple[int, int], columns: tuple[int, int]) -> Placement:
    return Placement(
        table=table,
        shard=shard,
        device="",
        row_begin=rows[0],
        row_end=rows[1],
        column_begin=columns[0],
        column_end=columns[1],
    )


WHOLE = (0, 10), (0, 8)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([piece("x", 0, *WHOLE)], "places table 'x', which the model has not; it has t, u"),
        ([piece("t", 0, *WHOLE), piece("u", 2, *WHOLE)], "must use each of shards 0 to 1"),
        ([piece("t", 0, *WHOLE), piece("t", 1, *WHOLE)], "pieces of table 't' must be all columns"),
        (
            [piece("u", 0, *WHOLE), piece("t", 1, (0, 5), (0, 8)), piece("t", 0, (6, 10), (0, 8))],
            "pieces of table 't' must be all columns of runs of its 10 rows",
        ),
        (
            [piece("u", 0, *WHOLE), piece("t", 1, (0, 5), (0, 8)), piece("t", 0, (5, 10), (0, 4))],
            "each row or column once",
        ),
        (
            [piece("u", 0, *WHOLE), piece("t", 1, (0, 5), (0, 8)), piece("t", 1, (5, 10), (0, 8))],
            "table 't' twice in one shard",
        ),
        ([piece("t", 0, *WHOLE), piece("t", 1, (0, 0), (0, 8))], "pieces of table 't'"),
        (
            [piece("u", 0, *WHOLE), piece("t", 1, (0, 10), (0, 3)), piece("t", 0, (0, 10), (3, 8))],
            "cuts table 't' within a byte; int4 is cut at multiples of 2",
        ),
        ([piece("u", 0, *WHOLE), piece("u", 1, *WHOLE)], "pieces of table 't' must"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(pieces: list[Placement], message: str) -> None:
    tables = [table("t", 10), table("u", 10)]
    kinds = {"t": ROW_TYPES["int4"], "u": ROW_TYPES["int4"]}
    with pytest.raises(UserError, match=message):
        check_plan(ShardingPlan(num_shards=2, placements=tuple(pieces)), tables, kinds)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not a plan"),
        ("[]", "is not a plan"),
        ('{"num_shards": 2}', "is not a plan .'placements'"),
        ('{"num_shards": 2, "placements": [{"table": "t"}]}', "is not a plan"),
        ('{"num_shards": "2", "placements": []}', None),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(
    content: str | None, message: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message or "whole numbers"):
        read_plan(path)


def test_a_gpus_placements_name_its_devices() -> None:
    types = {"t": ROW_TYPES["int8"]}
    plan = plan_shards([table("t", 9)], types, shards=3, device="cuda", sharding="row_wise")
    assert [p.device for p in plan.placements] == ["cuda:0", "cuda:1", "cuda:2"]
