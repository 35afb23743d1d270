"""Shows an alert firing and resolving: a real Prometheus scrapes a real server, which gets more calls than it takes.

    python deploy/monitoring/show_alert.py --model model.pt [--server build/cpp/release/tessera-server]

Needs `prometheus` on the path (Debian's package has it).  The server has a short queue, and more calls than that are
kept in flight until TesseraRefuses fires; then they stop until it has resolved.  The rules are alerts.yaml with every
time divided by 30, so that this takes about a minute.  Each query of the dashboard is asked meanwhile, too, and what it
gives is counted.  Exit status: 0 both were seen, and Prometheus took every query; 1 the last line says what failed.
"""

from __future__ import annotations

import argparse
import contextlib
import http
import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tessera.serving.client import (
    Draw,
    Overloaded,
    PredictorClient,
    RequestArrays,
    RequestDrawer,
    read_schema,
)

FOLDER = Path(__file__).resolve().parent
ALERT = "TesseraRefuses"
_FASTER = 30
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_LIMIT_S = 300
_SAMPLES = 64
_CALLERS = 16


def faster(text: str) -> str:
    """Rules with every range and every ``for`` divided, to whole seconds and at least two."""

    def divided(found: re.Match[str]) -> str:
        seconds = int(found[2]) * _SECONDS[found[3]] / _FASTER
        return f"{found[1]}{max(2, round(seconds))}s"

    return re.sub(r"(\[|for: |offset )(\d+)([smh])", divided, text)


@contextmanager
def serving(command: list[str], model: str, *more: str) -> Iterator[tuple[str, str]]:
    """A server with a queue of two requests and the flags ``more``; its gRPC and HTTP addresses."""
    limits = ["--max-queue-samples", str(2 * _SAMPLES), "--max-request-samples", str(_SAMPLES)]
    flags = ["--model", model, "--port", "0", "--http-port", "0", *limits, *more]
    process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        lines = (json.loads(line) for line in process.stderr if line.startswith("{"))
        ready = next((line for line in lines if line["event"] == "ready"), None)
        if ready is None:
            sys.exit(f"the server ended with {process.wait()}")
        yield f"127.0.0.1:{ready['port']}", f"127.0.0.1:{ready['http_port']}"
    finally:
        process.terminate()
        process.communicate()


@contextmanager
def scraping(targets: list[str], folder: Path) -> Iterator[str]:
    """A Prometheus with the rules that scrapes ``targets`` each second; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (folder / "alerts.yaml").write_text(faster((FOLDER / "alerts.yaml").read_text()))
    jobs = [{"job_name": "tessera", "static_configs": [{"targets": targets}]}]
    times = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config = {"global": times, "rule_files": ["alerts.yaml"], "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    process = subprocess.Popen(
        [
            "prometheus",
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=data",
            f"--web.listen-address={address}",
            "--log.level=error",
        ],
        cwd=folder,
    )
    try:
        yield address
    finally:
        process.terminate()
        process.wait()


def asked(address: str, path: str, **parameters: str) -> Any:
    """What Prometheus answers; None while it does not."""
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return json.load(reply)["data"]
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.SERVICE_UNAVAILABLE:
            return None
        sys.exit(f"Prometheus refuses {parameters}: {error.read().decode()}")
    except OSError:
        return None


def wait_for(address: str, state: str) -> None:
    """Until the alert is in ``state``; empty: it is not active."""
    began = time.monotonic()
    while time.monotonic() - began < _LIMIT_S:
        alerts = (asked(address, "alerts") or {"alerts": None})["alerts"]
        if alerts is not None:
            found = [alert for alert in alerts if alert["labels"]["alertname"] == ALERT]
            if (found[0]["state"] if found else "") == state:
                words = found[0]["annotations"]["summary"] if found else "is not active"
                print(f"{time.monotonic() - began:5.1f} s: {ALERT}: {words}")
                return
        time.sleep(0.2)
    sys.exit(f"{ALERT} did not become {state or 'inactive'} within {_LIMIT_S} s")


def call(client: PredictorClient, samples: RequestArrays) -> None:
    """Ask for scores, which may be refused because the queue is full."""
    with contextlib.suppress(Overloaded):
        client.predict_arrays(samples)


def overload(address: str, model: str, stop: threading.Event) -> None:
    """Keep one call in flight until ``stop``, refused or not."""
    schema = read_schema(model)
    samples = RequestDrawer(schema, Draw(), seed=0).samples(_SAMPLES)
    with PredictorClient(address, schema=schema, timeout_s=60) as client:
        while not stop.is_set():
            call(client, samples)


@contextmanager
def overloaded(addresses: list[str], model: str) -> Iterator[None]:
    """Keep more calls in flight than the servers take."""
    stop = threading.Event()
    callers = [
        threading.Thread(target=overload, args=(address, model, stop))
        for address in addresses
        for _ in range(_CALLERS)
    ]
    for caller in callers:
        caller.start()
    try:
        yield
    finally:
        stop.set()
        for caller in callers:
            caller.join()


def dashboard_panels() -> list[dict[str, Any]]:
    """The panels of the dashboard, as Grafana reads them."""
    found: list[dict[str, Any]] = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    return found


def plain(query: str) -> str:
    """A query of the dashboard for every job, server and model."""
    every = re.sub(r"\$(job|instance|model)", ".*", query)
    return every.replace("$__rate_interval", "10s")


def ask_dashboard(address: str) -> None:
    """Ask every query of the dashboard and say how many give series."""
    queries = [
        target["expr"] for panel in dashboard_panels() for target in panel.get("targets", ())
    ]
    filled = sum(bool(asked(address, "query", query=plain(query))["result"]) for query in queries)
    print(f"the dashboard: {filled} of {len(queries)} queries give series, and none is refused")


def main() -> int:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a package")
    parser.add_argument("--server", help="the C++ server's program (default: tessera serve)")
    args = parser.parse_args()
    command = [args.server] if args.server else [sys.executable, "-m", "tessera", "serve"]
    with (
        tempfile.TemporaryDirectory(prefix="tessera-alert-") as name,
        serving(command, args.model) as (address, http_address),
        scraping([http_address], Path(name)) as prometheus,
    ):
        wait_for(prometheus, "")
        with overloaded([address], args.model):
            wait_for(prometheus, "firing")
            ask_dashboard(prometheus)
        wait_for(prometheus, "")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
