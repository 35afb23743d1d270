"""The whole way on one machine: generate data, train, package, serve, predict, scrape.

Run by ``make demo``.  Every step is a command that a user would type; it is printed before it
runs.  The generated data is kept between runs; everything else is made again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
ROWS = 200_000
REQUESTS = 2_000
READY_TIMEOUT_S = 60
SHOWN_METRICS = (
    "tessera_requests_total",
    "tessera_batch_samples_sum",
    "tessera_batch_samples_count",
    "tessera_ids_total",
    "tessera_model_ready",
)


def say(text: str) -> None:
    """Print a heading, set off from the commands' own output."""
    print(f"\n== {text}", flush=True)


def shown(command: list[str]) -> list[str]:
    """Print ``command`` as a user would type it; returns it with the program's full path."""
    print("$ " + shlex.join(command), flush=True)
    return [str(BIN / command[0]), *command[1:]]


def run(command: list[str]) -> None:
    """Run one step; a failed one ends the demo with its exit status."""
    status = subprocess.run(shown(command), check=False).returncode
    if status:
        sys.exit(f"demo: '{shlex.join(command)}' ended with exit status {status}")


@contextlib.contextmanager
def serving(model: Path, log: Path) -> Iterator[dict[str, Any]]:
    """A server on free ports; yields its ``ready`` log line and stops it by SIGTERM after."""
    command = ["tessera", "serve", "--model", str(model), "--port", "0", "--http-port", "0"]
    with log.open("w") as stream:
        process = subprocess.Popen(shown(command), stderr=stream)
        try:
            yield wait_until_ready(process, log)
            process.send_signal(signal.SIGTERM)
            status = process.wait(timeout=30)
            print(f"SIGTERM: the server drained and ended with exit status {status}")
            if status:
                sys.exit(f"demo: the server ended with exit status {status}; see {log}")
        finally:
            if process.poll() is None:
                process.kill()


def wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    """Read the server's log until its ``ready`` line, which holds the ports it took."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if entry.get("event") == "ready":
                    return dict(entry)
        time.sleep(0.05)
    sys.exit(f"demo: the server did not become ready; its log:\n{log.read_text()}")


def main() -> None:
    """Run the steps in order and say what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dir", type=Path, default=Path(".demo"), help="work folder (default: %(default)s)"
    )
    folder = parser.parse_args().dir
    began = time.monotonic()
    os.chdir(ROOT)
    folder.mkdir(parents=True, exist_ok=True)
    data, run_folder, model = folder / "clicks.tsv", folder / "run", folder / "model.pt"

    say(f"1. Data: {ROWS:,} rows in Criteo's format from a known generating model")
    truth = Path(f"{data}.truth.json")
    if data.exists() and truth.exists():
        print(f"{data} is there from an earlier run")
    else:
        run(["tessera", "datagen", "--rows", str(ROWS), "--out", str(data), "--seed", "7"])

    say("2. Train a DLRM")
    shutil.rmtree(run_folder, ignore_errors=True)
    config = "training/configs/demo.yaml"
    run(["tessera", "train", "--config", config, f"data.path={data}", "--out", str(run_folder)])

    say("3. Package: quantize to int8, trace, script, one file")
    run(["package-model", str(run_folder), "--out", str(model)])
    run(["tessera", "verify", str(model)])

    say("4. Serve, predict, scrape")
    with serving(model, folder / "serve.log") as ready:
        address = f"127.0.0.1:{ready['port']}"
        predict = ["tessera", "predict", "--address", address, "--model-file", str(model)]
        predict += ["--random", str(REQUESTS), "--seed", "1"]
        answers = folder / "answers.jsonl"
        with answers.open("w") as stream:
            if subprocess.run(shown(predict), check=False, stdout=stream).returncode:
                sys.exit("demo: predict failed")
        print(f"first of {REQUESTS} answers: {answers.read_text().splitlines()[0]}")
        metrics_url = f"http://127.0.0.1:{ready['http_port']}/metrics"
        print(f"$ curl {metrics_url}")
        with urllib.request.urlopen(metrics_url, timeout=10) as reply:
            metrics = reply.read().decode()
        print("\n".join(m for m in metrics.splitlines() if m.startswith(SHOWN_METRICS)))

    final = json.loads((run_folder / "final.json").read_text())
    say(f"Done in {time.monotonic() - began:.0f} s")
    print(
        f"test AUC {final['test']['auc']:.4f}; the generating model itself reaches "
        f"{json.loads(truth.read_text())['auc']:.4f}\n"
        f"report   {run_folder / 'report.html'}\n"
        f"package  {model} ({model.stat().st_size / 1e6:.1f} MB)\n"
        "next     tessera train --config training/configs/demo.yaml data.path=YOUR.tsv\n"
        "         make load-test      (locust against a server of its own)\n"
        "         README.md has the tour"
    )


if __name__ == "__main__":
    main()
