"""The manifest as JSON and back, and what a broken one is told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tessera.serving.package.evaluation import Evaluation, LabelQuality, Quality
from tessera.serving.package.manifest import (
    FORMAT_VERSION,
    OLDEST_FORMAT_VERSION,
    Manifest,
)
from tessera.serving.package.records import Records


@pytest.fixture(scope="module")
def manifest(package: Path) -> Manifest:
    return Records(package).manifest()


def test_reading_gives_back_what_was_written(manifest: Manifest) -> None:
    quality = Quality(auc=0.7, normalised_entropy=None, log_loss=1.0, calibration=2.0)
    full = dataclasses.replace(
        manifest,
        evaluation=Evaluation(
            rows=3,
            fp32=quality,
            packaged=quality,
            max_abs_score_error=1e-9,
            labels={
                "spent": LabelQuality(
                    task="regression",
                    rows=2,
                    fp32={"r_squared": -1.5},
                    packaged={"r_squared": None},
                )
            },
            members={"member 1": {"spent": {"r_squared": 0.5}}},
        ),
        training_metrics={"valid": {"auc": 0.75, "rows": 10, "calibration": None}},
        source={"step": "3"},
    )
    for written in (manifest, full):
        assert Manifest.from_bytes(written.to_bytes()) == written
    rows = Manifest.from_bytes(full.to_bytes()).training_metrics["valid"]["rows"]
    assert type(rows) is int


def test_the_record_is_readable_text(manifest: Manifest) -> None:
    assert json.loads(manifest.to_bytes())["schema"]["features"][0]["name"] == "user"
    assert b"\n" in manifest.to_bytes().strip()


def set_at(path: str, value: object) -> Any:
    def change(data: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        target: Any = data
        for part in parents:
            target = target[int(part)] if part.isdigit() else target[part]
        if value is None:
            del target[last]
        else:
            target[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            set_at("format_version", 99),
            rf"format_version is 99, this tessera reads {OLDEST_FORMAT_VERSION} to {FORMAT_VERSION}",
        ),
        (set_at("format_version", None), "format_version is missing"),
        (set_at("name", None), "manifest: missing key 'name'"),
        (set_at("schema.nickname", "x"), "manifest.schema: unknown key 'nickname'"),
        (set_at("name", 3), "manifest.name: expected a text, found an integer"),
        (
            set_at("bytes_fp32", True),
            "manifest.bytes_fp32: expected an integer, found true or false",
        ),
        (set_at("tables", {}), "manifest.tables: expected a list, found an object"),
        (
            set_at("tables.0.rows", "9"),
            r"manifest.tables\[0\].rows: expected an integer, found a text",
        ),
        (set_at("tables.0.color", 1), r"manifest.tables\[0\]: unknown key 'color'"),
        (set_at("schema.features.1.hashing", "md5"), r"features\[1\].hashing: expected one of"),
        (
            set_at("schema.features.1.dim", 1.5),
            r"features\[1\].dim: expected an integer, found a number",
        ),
        (set_at("schema.outputs", None), "manifest.schema: missing key 'outputs'"),
        (set_at("golden.atol", "0"), "manifest.golden.atol: expected a number, found a text"),
        (set_at("evaluation", 1), "manifest.evaluation: expected an object, found an integer"),
        (set_at("records", []), "manifest.records: expected an object, found a list"),
        (
            set_at("operator_libraries", [7]),
            r"operator_libraries\[0\]: expected a text, found an integer",
        ),
    ],
)
def test_a_broken_manifest_names_the_key(manifest: Manifest, change: Any, message: str) -> None:
    data = manifest.to_json()
    change(data)
    with pytest.raises(ValueError, match=message):
        Manifest.from_bytes((json.dumps(data, indent=1) + "\n").encode())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"null"])
def test_what_is_no_manifest_at_all_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"not JSON|format_version|not ASCII"):
        Manifest.from_bytes(content)
