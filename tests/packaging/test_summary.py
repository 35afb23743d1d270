"""The text about a package."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tessera.serving.inspect.summary import MOST_TABLES, describe, human_bytes, summarize
from tessera.serving.package.manifest import Placement, ShardingPlan
from tessera.serving.package.records import Records
from tessera.serving.package.signed_record import Signature


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")],
)
def test_sizes_are_in_powers_of_1024(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_many_tables_are_cut_to_the_worst(package: Path) -> None:
    manifest = Records(package).manifest()
    table = manifest.tables[0]
    tables = tuple(
        dataclasses.replace(table, name=f"t{number:03d}", relative_rmse=number / 1000)
        for number in range(MOST_TABLES + 1)
    )
    text = summarize(dataclasses.replace(manifest, tables=tables))
    assert "31 tables, the 10 with the largest" in text
    assert "t030" in text
    assert "t021" in text
    assert "t020" not in text
    all_shown = summarize(dataclasses.replace(manifest, tables=tables[:MOST_TABLES]))
    assert all(f"t{number:03d}" in all_shown for number in range(MOST_TABLES))


def test_a_plan_of_several_shards_is_listed_piece_by_piece(package: Path) -> None:
    manifest = Records(package).manifest()
    assert "where the tables lie" not in describe(
        manifest, path="m.pt", file_bytes=1, shares_rows=True
    )
    table = dataclasses.replace(manifest.tables[0], name="t", rows=10, dim=8, bytes=1200)
    pieces = tuple(
        Placement(
            table="t",
            shard=shard,
            device=f"cuda:{shard}",
            row_begin=begin,
            row_end=end,
            column_begin=0,
            column_end=8,
        )
        for shard, (begin, end) in enumerate([(0, 6), (6, 10)])
    )
    plan = ShardingPlan(num_shards=2, placements=pieces)
    spread = dataclasses.replace(manifest, plan=plan, tables=(table,))
    text = describe(spread, path="m.pt", file_bytes=1, shares_rows=True)
    lines = [line.split() for line in text.splitlines()]
    assert ["0", "cuda:0", "t", "0", "to", "6", "0", "to", "8", "720", "B"] in lines
    assert ["1", "cuda:1", "t", "6", "to", "10", "0", "to", "8", "480", "B"] in lines
    assert "2 shards on cuda:0, cuda:1" in text


def test_a_signature_is_shown_as_a_claim(package: Path) -> None:
    manifest = Records(package).manifest()
    assert "signature   none" in describe(manifest, path="m.pt", file_bytes=1, shares_rows=True)
    signature = Signature(algorithm="ed25519", public_key="ab" * 32, value="cd" * 64)
    text = describe(
        dataclasses.replace(manifest, signature=signature),
        path="m.pt",
        file_bytes=1,
        shares_rows=True,
    )
    assert f"says key {'ab' * 32} ('tessera verify" in text
