"""Edge values of every field of the manifest: both readers take them, or both refuse them in one line."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tessera.serving.commands import inspect
from tessera.serving.package.generate import HEADER, header
from tessera.serving.package.manifest import MANIFEST_RECORD, Manifest
from tessera.serving.package.records import Records
from tests.attack.packages import in_this_process
from tests.conformance.conformance_harness import CPP_PROGRAM
from tests.packaging.archives import in_version_3, in_version_4, read_records, write_records
from tests.patience import PATIENCE_S

READER = CPP_PROGRAM.parent / "tests" / "read_manifests"

RAW = (
    *("-1", "0", "1", "1.5", "3.0", "1e2", "-0.0", "1000000000000", "9223372036854775807"),
    *("9223372036854775808", "18446744073709551616", "-9223372036854775809", "1e308", "1e400"),
    *(
        f"1{'0' * 400}",
        f"1{'0' * 5000}",
        "NaN",
        "Infinity",
        "-Infinity",
        "01",
        "+1",
        "true",
        "null",
    ),
    *(
        '""',
        '"x"',
        '"2.13"',
        '"a\\nb"',
        '"a\\u0000b"',
        '"\\ud800"',
        '"\\udc00\\ud800"',
        '"\\u2028"',
    ),
    *('"\\ud83d\\ude00"', '"\\u0085"', '"cpu"', f'"{"0" * 64}"', f'"{"A" * 64}"', "[]", "{}"),
    *('[""]', "[{}]", '{"": ""}', '{"a": 1, "a": 1}', '{"\\ud800": ""}', f"{'[' * 600}{']' * 600}"),
    *('"\\x"', "[1,]", "'x'", "nul", "", '"é"'),
)
"""What stands in the place of each field, as JSON or as something that is not."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field's path, of lists the first entry's."""
    if path:
        yield path
    if isinstance(value, dict):
        shown = (
            list(value.items())[:1] if path and path[-1] in {"records", "source"} else value.items()
        )
        for key, item in shown:
            yield from places(item, (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def with_raw(data: Any, path: tuple[Any, ...], raw: str) -> bytes:
    """The manifest's bytes with ``raw`` in the place of a field."""
    copy = json.loads(json.dumps(data))
    target = copy
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = "HERE"
    text = json.dumps(copy, indent=1) + "\n"
    return text.replace('"HERE"', raw).encode()


def python_refusal(content: bytes) -> str:
    try:
        Manifest.from_bytes(content)
    except ValueError as error:
        return str(error)
    return ""


def cpp_refusals(folder: Path, contents: list[bytes]) -> list[str]:
    """What the C++ reader says of each; empty where it takes it."""
    file = folder / "manifests"
    with file.open("wb") as stream:
        for content in contents:
            stream.write(len(content).to_bytes(8, "little") + content)
    done = subprocess.run(
        [READER, file], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    return done.stdout.split("\n")[:-1]


@pytest.fixture(scope="module")
def manifest(package: Path) -> dict[str, Any]:
    data = Records(package).manifest().to_json()
    quality = {"auc": 0.5, "normalised_entropy": None, "log_loss": 1.0, "calibration": 1}
    schema = data["schema"]
    ranges = [{"least": -1.5, "most": 3, "missing": 0.25} for _ in schema["dense_features"]]
    ranges[1:2] = [{"least": None, "most": None, "missing": 1}]
    others = [{"name": "clicked", "role": "label"}]
    return {
        **data,
        "schema": {**schema, "dense_ranges": ranges, "other_columns": others},
        "source": {"step": "3"},
        "training_metrics": {"valid": {"auc": 0.5, "rows": 3}},
        "evaluation": {
            "rows": 3,
            "fp32": quality,
            "packaged": quality,
            "max_abs_score_error": 1e-9,
            "labels": {
                "y": {
                    "task": "binary",
                    "rows": 3,
                    "fp32": {"auc": 0.5},
                    "packaged": {"auc": None},
                }
            },
            "members": {"member 1": {"y": {"auc": 0.5}}},
        },
    }


def whole(data: dict[str, Any], **changes: Any) -> bytes:
    return (json.dumps({**data, **changes}, indent=1) + "\n").encode()


def hostile(data: dict[str, Any]) -> list[bytes]:
    """Manifests that are too large, or wrong as a whole."""
    plan, schema = data["plan"], data["schema"]
    outputs, features = schema["outputs"], schema["features"]
    return [
        whole(data, source={"a": [[] for _ in range(3_000_000)]}),
        whole(data, operator_libraries=["x"] * 500_000),
        whole(data, source={str(i): "" for i in range(100_000)}),
        whole(data, source={"a": "x" * (1 << 20)}),
        whole(data, schema={**schema, "outputs": []}),
        whole(data, schema={**schema, "outputs": outputs * 2}),
        whole(data, schema={**schema, "features": features + features[:1]}),
        whole(data, tables=data["tables"] * 2),
        whole(data, tables=[]),
        whole(data, plan={**plan, "num_shards": 10**12}),
        whole(data, plan={**plan, "num_shards": 4096}),
        whole(data, plan={**plan, "num_shards": 4097}),
        whole(data, plan={**plan, "placements": [{**plan["placements"][0], "shard": 1}]}),
        whole(data, plan={**plan, "placements": [{**plan["placements"][0], "table": "?"}]}),
        whole(data, nickname="x"),
        whole({key: value for key, value in data.items() if key != "name"}),
        whole(data)[:-1],
        b"[" * 100_000,
        b"\xef\xbb\xbf" + whole(data),
        whole(data).decode().encode("utf-16"),
    ]


def mixed_versions(data: dict[str, Any]) -> list[bytes]:
    """Version 3 with each of its schema's fields damaged, and fields of one version in the other."""
    old, schema = in_version_3(data), data["schema"]
    good = schema["dense_ranges"]
    wrong_ranges = [
        good[:-1],
        [*good, good[0]],
        [{**good[0], "least": 2.0, "most": 1.0}, *good[1:]],
        [{**good[0], "least": None, "most": 1.0}, *good[1:]],
    ]
    in_schema = [path for path in places(old) if path[0] in {"schema", "format_version"}]
    return [
        *(with_raw(old, path, raw) for path in in_schema for raw in RAW),
        whole(data, format_version=3),
        whole(old, format_version=4),
        whole(data, schema={**data["schema"], "dense_transform": "log1p"}),
        whole(old, schema={**old["schema"], "string_hash": "xxh64"}),
        whole(data, schema={**data["schema"], "dense_columns": []}),
        whole(data, schema={**data["schema"], "dense_columns": ["x"] * 5}),
        *(whole(data, schema={**schema, "dense_ranges": ranges}) for ranges in wrong_ranges),
        with_raw(in_version_4(data), ("format_version",), "5"),
        whole(data, format_version=4),
    ]


def test_both_readers_decide_alike_and_say_why(manifest: dict[str, Any], tmp_path: Path) -> None:
    cases = [with_raw(manifest, path, raw) for path in places(manifest) for raw in RAW]
    cases += [whole(manifest), *hostile(manifest), *mixed_versions(manifest)]
    assert len(cases) > 3000
    found = [python_refusal(case) for case in cases]
    assert any(not reason for reason in found)
    for case, reason in zip(cases, found, strict=True):
        assert len(reason.splitlines()) <= 1, reason
        assert reason.isprintable(), (case[:300], reason)
    assert python_refusal(whole(manifest)) == ""
    assert python_refusal(whole(in_version_3(manifest))) == ""
    assert python_refusal(whole(in_version_4(manifest))) == ""
    assert all(found[-12:])
    if not READER.exists():
        pytest.skip("the C++ reader is not built (make build)")
    for case, ours, theirs in zip(cases, found, cpp_refusals(tmp_path, cases), strict=True):
        assert bool(ours) == bool(theirs), (case[-3000:], ours, theirs)


def test_inspect_ends_without_a_traceback(
    manifest: dict[str, Any], package: Path, tmp_path: Path
) -> None:
    records = read_records(package)
    raws = (
        "0",
        "9223372036854775807",
        f"1{'0' * 400}",
        '"\\ud800"',
        "1e308",
        '"\\ud83d\\ude00"',
        "[]",
    )
    parser = inspect.argparse.ArgumentParser()
    inspect.add_arguments(parser)
    for path in places(manifest):
        for raw in raws:
            content = with_raw(manifest, path, raw)
            file = write_records(tmp_path / "m.pt", {**records, MANIFEST_RECORD: content})
            for flags in ([], ["--json"]):
                args = parser.parse_args([str(file), *flags])
                outcome = in_this_process(functools.partial(inspect.run, args))
                assert outcome.status in {0, 2}
                assert outcome.status == 0 or len(outcome.said.splitlines()) == 1
                outcome.said.encode()


def test_the_generated_header_is_up_to_date() -> None:
    assert header() == HEADER.read_text(), "run make package-rules"
    assert max(len(line) for line in header().splitlines()) < 120
    assert not re.search(r"\s+$", header().split("\n")[0])
