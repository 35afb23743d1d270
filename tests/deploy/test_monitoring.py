"""The dashboard and the alerts name metrics and labels that the servers export, and docs/metrics.md names all of them."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from tessera.serving.server.metrics import reference
from tests import REPOSITORY
from tests.conformance.test_surface import FAMILIES, OWN_FAMILIES

MONITORING = REPOSITORY / "deploy/monitoring"
EVERY = {family.name: family for family in reference.families()}
SAMPLES = {
    name: (family, labels) for family in EVERY.values() for name, labels in family.samples().items()
} | {"up": (None, frozenset())}
OF_PROMETHEUS = {"job", "instance", "le"}

NAME = re.compile(r"\b((?:tessera|process)_\w+|up)\b(?!\s*\()(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!=|!~|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")


def rules():
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def board():
    return json.loads((MONITORING / "dashboard.json").read_text())


def queries():
    """Where a query stands, and the query."""
    for alert, rule in rules().items():
        yield alert, rule["expr"]
    for panel in board()["panels"]:
        for target in panel.get("targets", ()):
            yield f"{panel['title']}: {target['legendFormat']}", target["expr"]
    for variable in board()["templating"]["list"]:
        yield f"variable {variable['name']}", variable["query"]


def wrong_names(query):
    """What a query names and no server exports."""
    known = set(OF_PROMETHEUS)
    for name, matchers in NAME.findall(query):
        if name not in SAMPLES:
            yield name
            continue
        family, labels = SAMPLES[name]
        known |= labels
        for label, _, values in MATCHER.findall(matchers):
            if label not in labels | OF_PROMETHEUS:
                yield f"{name}{{{label}}}"
            words = family.labels.get(label, ()) if family else ()
            if words and not values.startswith("$"):
                yield from (f"{label}={v}" for v in values.split("|") if v not in words)
            if label == "le" and float(values) not in family.bounds:
                yield f"{name}{{le={values}}}"
    for names in GROUPING.findall(query):
        yield from (name.strip() for name in names.split(",") if name.strip() not in known)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("rate(tessera_request_total[5m])", ["tessera_request_total"]),
        ('sum by (job) (tessera_requests_total{code="OKAY"})', ["code=OKAY"]),
        ("tessera_queue_samples{stage='x', stage=\"x\"}", ["tessera_queue_samples{stage}"]),
        ("sum by (stage) (tessera_queue_samples)", ["stage"]),
        (
            'tessera_request_duration_seconds_bucket{le="0.11"}',
            ["tessera_request_duration_seconds_bucket{le=0.11}"],
        ),
        ('up{job="x"} == 0 and on (job, instance) process_open_fds', []),
    ],
)
def test_a_wrong_name_is_found(query, found):
    assert list(wrong_names(query)) == found


def test_every_name_in_dashboard_and_alerts_is_exported():
    found = list(queries())
    assert len(found) > 50
    assert {where: wrong for where, query in found if (wrong := list(wrong_names(query)))} == {}


def test_summaries_name_labels_that_the_alert_has():
    for alert, rule in rules().items():
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        groups = [names for names in GROUPING.findall(rule["expr"]) if "sum by" in rule["expr"]]
        kept = {name.strip() for names in groups for name in names.split(",")} or None
        assert kept is None or named <= kept, alert
        assert rule["labels"]["severity"] in ("critical", "warning"), alert


def test_the_operations_guide_has_every_alert_and_no_other():
    page = (REPOSITORY / "docs/operations.md").read_text()
    assert set(re.findall(r"Tessera[A-Z]\w+", page)) == set(rules())
    named = set(re.findall(r"`((?:tessera|process)_[a-z_]+)", page))
    # A line of the log, which tests/docs looks for.
    assert named - {"process_ended"} <= {family.name for family in EVERY.values()}


def test_every_alert_is_tried_quiet_and_firing():
    tried = {}
    for case in yaml.safe_load((MONITORING / "alerts_test.yaml").read_text())["tests"]:
        for one in case["alert_rule_test"]:
            tried.setdefault(one["alertname"], set()).add(bool(one["exp_alerts"]))
    assert tried == {alert: {False, True} for alert in rules()}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("command", [("check", "alerts.yaml"), ("test", "alerts_test.yaml")])
def test_promtool_agrees(command):
    done = subprocess.run(
        ["promtool", command[0], "rules", command[1]],
        cwd=MONITORING,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_is_what_its_table_says():
    done = subprocess.run(
        [sys.executable, MONITORING / "dashboard.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_panel_lies_on_another():
    taken = set()
    for panel in board()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in board()["panels"]}) == len(board()["panels"])


def test_the_page_of_metrics_is_current():
    assert reference.PAGE.read_text(encoding="utf-8") == reference.markdown(EVERY.values()), (
        f"docs/metrics.md is not what the servers' code says: run {reference.WRITE_COMMAND}"
    )
    target = reference.WRITE_COMMAND.removeprefix("make ")
    assert f"\n{target}:" in (REPOSITORY / "Makefile").read_text()


def test_the_families_are_those_of_a_scrape():
    """The conformance suite holds running servers to the same ones."""
    scraped = dict(FAMILIES)
    for own in OWN_FAMILIES.values():
        scraped |= own
    by_name = {
        family.name.removesuffix("_total"): (family.kind, set(family.labels))
        for family in EVERY.values()
        if family.servers != reference.PROCESSES
    }
    assert by_name == scraped


def test_both_servers_say_the_same_of_a_metric():
    cpp = {family.name: family for family in reference.cpp_families()}
    python = {
        name: family
        for name, family in EVERY.items()
        if name.startswith("tessera_") and family.servers == reference.BOTH
    }
    assert python.keys() <= cpp.keys()
    own = {name for names in OWN_FAMILIES.values() for name in names}
    assert {name.removesuffix("_total") for name in cpp.keys() - python.keys()} == own
    assert {name: (f.kind, f.text) for name, f in python.items()} == {
        name: (cpp[name].kind, cpp[name].text) for name in python
    }
