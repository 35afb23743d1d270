"""Writes dashboard.json, the Grafana dashboard of both servers, and prometheus-rule.yaml, the alerts for the operator.

    python deploy/monitoring/dashboard.py --write

The dashboard is laid out from the table in panels.py.  Grafana takes the file as it is (Dashboards, New, Import), or from
a folder that it watches.  The other file is alerts.yaml as a PrometheusRule.  tests/deploy holds every name in the queries
to what the servers export, and both files to what they are made of.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from panels import COLUMNS, ROWS, SERVER, Panel

FOLDER = Path(__file__).resolve().parent
_RULE = """\
# The rules of alerts.yaml for the Prometheus operator; written by dashboard.py.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: tessera
  labels: {app.kubernetes.io/name: tessera}
spec:
"""
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1},
                "panels": [],
            }
        )
        top += 1
        left = 0
        height = 4 if all(panel.kind == "stat" for panel in row) else 8
        for panel in row:
            if left + panel.width > COLUMNS:
                left, top = 0, top + height
            place = {"x": left, "y": top, "w": panel.width, "h": height}
            panels.append(_panel(panel, len(panels) + 1, place))
            left += panel.width
        top += height
    return {
        "uid": "tessera-servers",
        "title": "Tessera servers",
        "tags": ["tessera"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _SOURCE,
            "expr": expr,
            "legendFormat": legend,
        }
        for index, (legend, expr) in enumerate(panel.queries.items())
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"tooltip": {"mode": "multi"}} if panel.kind == "timeseries" else {},
        "targets": targets,
    }


def _variables() -> list[dict[str, Any]]:
    chosen = {"type": "query", "datasource": _SOURCE, "refresh": 2, "sort": 1}
    several = {
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    at_job = 'tessera_build_info{job=~"$job"}'
    return [
        {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus"},
        {
            **chosen,
            **several,
            "name": "job",
            "label": "Job",
            "query": "label_values(tessera_build_info, job)",
        },
        {
            **chosen,
            **several,
            "name": "instance",
            "label": "Server",
            "query": f"label_values({at_job}, instance)",
        },
        {
            **chosen,
            **several,
            "name": "model",
            "label": "Model",
            "query": f"label_values(tessera_model_ready{{{SERVER}}}, model)",
        },
    ]


def prometheus_rule() -> str:
    """The alerts as an object of Kubernetes."""
    rules = (FOLDER / "alerts.yaml").read_text(encoding="utf-8")
    return _RULE + textwrap.indent(rules[rules.index("groups:") :], "  ")


def dashboard_json() -> str:
    """The dashboard's file: one line for each panel and variable, so that a change is one line of a diff."""
    made = dashboard()
    panels, variables = made.pop("panels"), made.pop("templating")["list"]

    def lines(rows: list[dict[str, Any]]) -> str:
        return "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in rows) + "\n  ]"

    head = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in made.items())
    listed = f'  "templating": {{"list": {lines(variables)}}},\n  "panels": {lines(panels)}\n'
    return "{\n" + head + listed + "}\n"


def main() -> int:
    """0: the files are current, or were written; 1: one is not current."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the files (default: compare)")
    write = parser.parse_args().write
    made = {"dashboard.json": dashboard_json(), "prometheus-rule.yaml": prometheus_rule()}
    for name, text in made.items():
        path = FOLDER / name
        if write:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{name} is not current: run python deploy/monitoring/dashboard.py --write")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
