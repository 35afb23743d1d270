"""Pictures of what watches the servers: a real Prometheus scrapes both under load, an alert fires and resolves.

    python deploy/monitoring/screenshots.py --model model.pt --server build/cpp/release/tessera-server --out FOLDER

Needs `prometheus` and `chromium` on the path (Debian's packages have them).  A Python server and the C++ server of
--server answer calls, a Prometheus scrapes both each second, and a collector takes their traces.  More calls are sent than
the servers take until TesseraRefuses fires, then fewer until it has resolved; as in show_alert.py, the rules' times are
divided by 30.  What is written to FOLDER:

    targets.png, graph.png, alert-firing.png, alert-resolved.png   pages of Prometheus, by the browser
    dashboard.png   every panel of dashboard.json at its place, drawn here of what Prometheus answers: no Grafana is needed
    traces.png      a trace of each server as the collector has it

Takes some three minutes.  Exit status: 0; 1 the last line says what failed.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from drawing import Series, draw_dashboard, draw_traces, legend
from show_alert import (
    ALERT,
    asked,
    call,
    dashboard_panels,
    overloaded,
    plain,
    scraping,
    serving,
    wait_for,
)
from span_collector import Span, collecting

from tessera.serving.client import Draw, PredictorClient, RequestDrawer, read_schema

_STEP_S = 1
_WIDTH, _HEIGHT = 1200, 1000
_QUIET_S = 20
_GRAPHS = (
    'sum by (instance, code) (rate(tessera_requests_total{job="tessera"}[10s]))',
    "sum by (instance) (tessera_queue_samples)",
    f'ALERTS{{alertname="{ALERT}"}}',
)


def picture(browser: str, url: str, path: Path, height: int = _HEIGHT) -> None:
    """A picture of a page, with what its scripts have drawn."""
    with tempfile.TemporaryDirectory(prefix="tessera-browser-") as profile:
        flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu"]
        size = f"--window-size={_WIDTH},{height}"
        shot = [f"--screenshot={path}", "--virtual-time-budget=20000", f"--user-data-dir={profile}"]
        done = subprocess.run(
            [browser, *flags, size, *shot, url], capture_output=True, text=True, check=False
        )
    if not path.exists():
        sys.exit(f"{browser} took no picture of {url}: {done.stderr[-2000:]}")
    print(path)


def page_of(address: str, name: str) -> str:
    """The address of one of Prometheus' pages, which builds without its newer pages have elsewhere."""
    url = f"http://{address}/{name}"
    try:
        with urllib.request.urlopen(url):
            return url
    except urllib.error.HTTPError:
        return f"http://{address}/classic/{name}"


def graph_page(address: str, seconds: int) -> str:
    """The address of Prometheus' page of graphs over the last seconds."""
    parts: dict[str, str] = {}
    for number, query in enumerate(_GRAPHS):
        of = {"expr": query, "tab": "0", "range_input": f"{seconds}s", "step_input": str(_STEP_S)}
        parts |= {f"g{number}.{key}": value for key, value in of.items()}
    return f"{page_of(address, 'graph')}?{urllib.parse.urlencode(parts)}"


def some_calls(addresses: list[str], model: str, stop: threading.Event) -> None:
    """Ask each server now and then until ``stop``."""
    schema = read_schema(model)
    samples = RequestDrawer(schema, Draw(), seed=1).samples(8)
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(PredictorClient(address, schema=schema, timeout_s=60))
            for address in addresses
        ]
        while not stop.wait(0.02):
            for client in clients:
                call(client, samples)


class Asker:
    """Asks Prometheus for the series of a query since a time."""

    def __init__(self, address: str, began: float) -> None:
        self._address, self._began = address, began

    def __call__(self, query: str, form: str) -> Series:
        """The series of ``query`` with legends of the form ``form``."""
        now = time.time()
        told = asked(
            self._address,
            "query_range",
            query=plain(query),
            start=str(self._began),
            end=str(now),
            step=str(_STEP_S),
        )
        return [
            (
                legend(form, one["metric"]),
                [float(at) - now for at, _ in one["values"]],
                [float(value) for _, value in one["values"]],
            )
            for one in told["result"]
        ]


def whole_traces(spans: list[Span]) -> list[list[Span]]:
    """For each service, the newest of the traces that have the most spans."""
    by_trace: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        by_trace.setdefault((span.service, span.trace), []).append(span)
    chosen: dict[str, list[Span]] = {}
    for (service, _), trace in by_trace.items():
        if len(trace) >= len(chosen.get(service, ())):
            chosen[service] = trace
    return [chosen[service] for service in sorted(chosen)]


def main() -> int:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a package")
    parser.add_argument("--server", required=True, help="the C++ server's program")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    parser.add_argument("--browser", default="chromium", help="(default: chromium)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    commands = [[sys.executable, "-m", "tessera", "serve"], [args.server]]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tessera-alert-")))
        url, spans = stack.enter_context(collecting())
        flags = ["--otlp-endpoint", url, "--trace-share", "0.05"]
        running = [stack.enter_context(serving(one, args.model, *flags)) for one in commands]
        addresses = [address for address, _ in running]
        prometheus = stack.enter_context(scraping([page for _, page in running], folder))
        began = time.time()

        def take(page: str, name: str, height: int = _HEIGHT) -> None:
            picture(args.browser, page_of(prometheus, page), args.out / name, height)

        wait_for(prometheus, "")
        stop = threading.Event()
        calls = threading.Thread(target=some_calls, args=(addresses, args.model, stop))
        calls.start()
        try:
            time.sleep(_QUIET_S)  # for the pictures: both servers under a load that they take
            with overloaded(addresses, args.model):
                wait_for(prometheus, "firing")
                take("alerts", "alert-firing.png", 1_600)
            take("targets", "targets.png", 500)
            wait_for(prometheus, "")
            take("alerts", "alert-resolved.png", 1_600)
            seconds = round(time.time() - began) + 5
            picture(args.browser, graph_page(prometheus, seconds), args.out / "graph.png", 2_700)
            title = "dashboard.json, drawn of what Prometheus answered; seconds before the picture"
            filled = draw_dashboard(
                dashboard_panels(),
                Asker(prometheus, began),
                title,
                args.out / "dashboard.png",
            )
        finally:
            stop.set()
            calls.join()
        print(f"{args.out / 'dashboard.png'}: {filled} panels have series")
    traces = whole_traces(spans)
    if len(traces) != len(commands):
        sys.exit(f"{len(traces)} servers have sent traces, not {len(commands)}")
    draw_traces(traces, args.out / "traces.png")
    print(f"{args.out / 'traces.png'}: of {len({span.trace for span in spans})} traces")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
