"""The text about a package."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tessera.serving.records import Records
from tessera.serving.summary import MOST_TABLES, human_bytes, summarize


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
