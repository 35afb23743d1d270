"""The manifest as JSON and back, and what a broken one is told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tessera.serving.package.manifest import FORMAT_VERSION, Evaluation, Manifest, Quality
from tessera.serving.package.records import Records


@pytest.fixture(scope="module")
def manifest(package: Path) -> Manifest:
    return Records(package).manifest()


def test_reading_gives_back_what_was_written(manifest: Manifest) -> None:
    quality = Quality(auc=0.7, normalised_entropy=None, log_loss=1.0, calibration=2.0)
    full = dataclasses.replace(
        manifest,
        evaluation=Evaluation(rows=3, fp32=quality, packaged=quality, max_abs_score_error=1e-9),
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
            rf"format_version is 99, this tessera reads {FORMAT_VERSION}",
        ),
        (set_at("format_version", None), "format_version is None"),
        (set_at("name", None), r"missing keys \['name'\]"),
        (set_at("nickname", "x"), r"unknown keys \['nickname'\]"),
        (set_at("name", 3), "manifest.name: expected str, found int"),
        (set_at("bytes_fp32", True), "manifest.bytes_fp32: expected int, found bool"),
        (set_at("tables", {}), "manifest.tables: expected list, found dict"),
        (set_at("tables.0.rows", "9"), r"manifest.tables\[0\].rows: expected int, found str"),
        (set_at("tables.0.color", 1), r"manifest.tables\[0\]: .*unknown keys \['color'\]"),
        (set_at("schema.features.1.hashing", "md5"), r"features\[1\].hashing: expected one of"),
        (set_at("schema.features.1.dim", 1.5), r"features\[1\].dim: expected int, found float"),
        (set_at("schema.outputs", None), r"manifest.schema: missing keys \['outputs'\]"),
        (set_at("golden.atol", "0"), "manifest.golden.atol: expected float, found str"),
        (set_at("evaluation", 1), "manifest.evaluation: expected dict, found int"),
        (set_at("records", []), "manifest.records: expected dict, found list"),
        (set_at("operator_libraries", [7]), r"operator_libraries\[0\]: expected str, found int"),
    ],
)
def test_a_broken_manifest_names_the_key(manifest: Manifest, change: Any, message: str) -> None:
    data = manifest.to_json()
    change(data)
    with pytest.raises(ValueError, match=message):
        Manifest.from_bytes(json.dumps(data).encode())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"null"])
def test_what_is_no_manifest_at_all_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"not JSON|format_version"):
        Manifest.from_bytes(content)
