"""The operations guide names only flags, log lines and label values that exist; tests/deploy holds its metrics and alerts."""

import re

import pytest

from tessera.flags_reference import PAGE
from tessera.serving.server.metrics.reference import families
from tests import REPOSITORY

GUIDE = (REPOSITORY / "docs/operations.md").read_text(encoding="utf-8")
FLAGS = set(re.findall(r"(?<=`)--[\w-]+", PAGE.read_text(encoding="utf-8")))


def sources():
    for folder in ("serving/server", "cpp_server/src", "serving/repository"):
        for path in (REPOSITORY / folder).rglob("*"):
            if path.suffix in {".py", ".cc", ".h"}:
                yield path.read_text(encoding="utf-8")


def test_every_flag_exists():
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", GUIDE))
    assert len(named) > 15
    assert named <= FLAGS


def test_every_metric_and_label_value_exists():
    labels = {family.name: family.labels for family in families()}
    assert set(re.findall(r"\btessera_\w+", GUIDE)) <= {
        name + end for name in labels for end in ("", "_sum", "_count", "_bucket")
    }
    picked = re.findall(r'(tessera_\w+)\{(\w+)="(\w+)"\}', GUIDE)
    assert picked
    for metric, label, value in picked:
        assert value in labels[re.sub(r"_(sum|count|bucket)$", "", metric)][label]


def test_every_log_line_and_field_exists():
    text = "\n".join(sources())
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", GUIDE))
    named = {word for word in named if not word.startswith(("tessera_", "process_cpu"))}
    named = {word for word in named if not word.startswith("process_") or word == "process_ended"}
    assert {"load_failed", "internal_error", "commit_refused", "process_ended"} <= named
    of_others = {"round_robin"}  # gRPC's
    assert {word for word in named if f'"{word}"' not in text} - COLUMNS - of_others == set()


COLUMNS = {"p99_ms", "queue_us", "forward_us", "batch_samples", "requests_per_second"}


@pytest.mark.parametrize("column", sorted(COLUMNS | {"rate", "failed"}))
def test_every_column_of_the_load_generator_exists(column):
    report = (REPOSITORY / "cpp_server/src/load/report.cc").read_text(encoding="utf-8")
    header = re.search(r"csv_header\(\) \{\s*return ([^;]+);", report)[1]
    assert column in re.sub(r'["\s]', "", header).replace("\\n", "").split(",")
    assert f"`{column}`" in GUIDE
