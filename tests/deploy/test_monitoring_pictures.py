"""What deploy/monitoring/screenshots.py draws itself, and which traces it chooses; the script needs a Prometheus and a browser."""

import json
import os
import subprocess
import sys

from tests.deploy.manifests import DEPLOY

# A program of its own: the scripts of the folder find one another as they do when they are run.
PROGRAM = """
import json, sys
from pathlib import Path
from drawing import draw_dashboard, draw_traces, legend
from screenshots import graph_page, whole_traces
from show_alert import dashboard_panels, plain
from span_collector import read_spans

folder, told = Path(sys.argv[1]), json.load(sys.stdin)
asked = []

def ask(query, form):
    asked.append(plain(query))
    if "tessera_requests_total" not in query:
        return []
    return [(legend(form, {"model": "m", "code": "OK"}), [-2.0, -1.0, 0.0], [1.0, 2.0, 3.0])]

filled = draw_dashboard(dashboard_panels(), ask, "title", folder / "dashboard.png")
traces = whole_traces([span for one in told for span in read_spans(one)])
draw_traces(traces, folder / "traces.png")
print(json.dumps({
    "filled": filled,
    "asked": asked,
    "legend": legend("{{model}} of {{ other }}", {"model": "m"}),
    "traces": [[span.name for span in trace] for trace in traces],
}))
"""


def span(trace, number, name, parent=None, **attributes):
    """A span as OTLP has it in JSON."""
    return {
        "traceId": f"{trace:032x}",
        "spanId": f"{number:016x}",
        **({} if parent is None else {"parentSpanId": f"{parent:016x}"}),
        "name": name,
        "kind": 2,
        "startTimeUnixNano": str(10**18 + number * 1_000),
        "endTimeUnixNano": str(10**18 + number * 1_000 + 900_000),
        "attributes": [
            {"key": key, "value": {"intValue": str(v)}} for key, v in attributes.items()
        ],
    }


def request(service, *spans):
    attributes = [{"key": "service.name", "value": {"stringValue": service}}]
    return {
        "resourceSpans": [
            {"resource": {"attributes": attributes}, "scopeSpans": [{"spans": list(spans)}]}
        ]
    }


def test_the_pictures_are_drawn(tmp_path):
    told = [
        request("b", span(1, 1, "call"), span(1, 2, "queue", 1), span(2, 3, "call")),
        request("a", span(3, 4, "call")),
        request("a", span(4, 5, "call"), span(4, 6, "forward", 5, batch=8)),
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path],
        input=json.dumps(told),
        env=os.environ | {"PYTHONPATH": str(DEPLOY / "monitoring")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["traces"] == [["call", "forward"], ["call", "queue"]]
    assert found["legend"] == "m of "
    panels = json.loads((DEPLOY / "monitoring/dashboard.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(found["asked"]) == len(queries)
    assert not [query for query in found["asked"] if "$" in query]
    of_calls = [
        panel
        for panel in panels
        if any("tessera_requests_total" in t["expr"] for t in panel.get("targets", ()))
    ]
    assert found["filled"] == len(of_calls) > 0
    for name in ("dashboard", "traces"):
        content = (tmp_path / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 10_000
