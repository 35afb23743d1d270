"""The whole way on one machine: rows of an own table, schema, train, package, serve, predict, scrape.

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

from shop_rows import write_shop

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
TESSERA_SERVER = ROOT / "build" / "cpp" / "release" / "tessera-server"
ROWS = 100_000
NEW_ROWS = 2_000
STRANGERS = 50  # shoppers of the new rows that the table did not have
READY_TIMEOUT_S = 180
SHOWN_METRICS = (
    "tessera_requests_total",
    "tessera_batch_samples_sum",
    "tessera_batch_samples_count",
    "tessera_ids_total",
    "tessera_model_ready",
    "tessera_feature_outside_range_total",
)


def say(text: str) -> None:
    """Print a heading, set off from the commands' own output."""
    print(f"\n== {text}", flush=True)


def shown(command: list[str]) -> list[str]:
    """Print ``command`` as a user would type it; returns it with the program's full path."""
    print("$ " + shlex.join(command), flush=True)
    program = BIN / command[0]
    return [str(program if program.exists() else command[0]), *command[1:]]


def run(command: list[str]) -> None:
    """Run one step; a failed one ends the demo with its exit status."""
    status = subprocess.run(shown(command), check=False).returncode
    if status:
        sys.exit(f"demo: '{shlex.join(command)}' ended with exit status {status}")


@contextlib.contextmanager
def serving(program: list[str], log: Path) -> Iterator[dict[str, Any]]:
    """A server on free ports; yields its ``ready`` log line and stops it by SIGTERM after."""
    command = [*program, "--port", "0", "--http-port", "0"]
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


def ask(program: list[str], model: Path, rows: Path, folder: Path) -> str:
    """Start a server, send it the rows and show its metrics; returns all answers."""
    with serving([*program, "--model", str(model)], folder / "serve.log") as ready:
        address = f"127.0.0.1:{ready['port']}"
        predict = ["tessera", "predict", "--address", address, "--model-file", str(model)]
        predict += ["--input", str(rows)]
        done = subprocess.run(shown(predict), check=False, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit("demo: predict failed")
        answers = done.stdout
        print(f"first of {len(answers.splitlines())} answers: {answers.splitlines()[0]}")
        metrics_url = f"http://127.0.0.1:{ready['http_port']}/metrics"
        print(f"$ curl {metrics_url}")
        with urllib.request.urlopen(metrics_url, timeout=10) as reply:
            metrics = reply.read().decode()
        print("\n".join(m for m in metrics.splitlines() if m.startswith(SHOWN_METRICS)))
    return answers


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
    data, truth = folder / "clicks.parquet", folder / "clicks.truth.json"
    config, run_folder, model = folder / "data.yaml", folder / "run", folder / "model.pt"

    say(f"1. Data: {ROWS:,} rows of a shop's clicks, with strings, lists, times and gaps")
    if data.exists() and truth.exists():
        print(f"{data} is there from an earlier run")
    else:
        best = write_shop(data, ROWS, seed=7)
        truth.write_text(json.dumps({"auc": best}))
        print(f"written: {data}")
    new_rows = folder / "new_rows.parquet"
    write_shop(new_rows, NEW_ROWS, seed=8, strangers=STRANGERS)

    say("2. Look at it, and write a config")
    config.unlink(missing_ok=True)  # that of an earlier run is not replaced
    run(["tessera", "schema", str(data), "--out", str(config)])

    say("3. Train")
    shutil.rmtree(run_folder, ignore_errors=True)
    # So small a model gains nothing from more threads or epochs.
    small = ["train.epochs=1", "train.threads=1"]
    run(["tessera", "train", "--config", str(config), *small, "--out", str(run_folder)])

    say("4. Package: quantize to int8, trace, script, one file")
    run(["package-model", str(run_folder), "--out", str(model)])
    run(["tessera", "verify", str(model)])

    say("5. Serve, predict rows as they are, scrape")
    answers = [ask(["tessera", "serve"], model, new_rows, folder)]
    if TESSERA_SERVER.exists():
        say("6. The same by the server in C++")
        answers.append(ask([str(TESSERA_SERVER)], model, new_rows, folder))
        same = "the same bits" if answers[0] == answers[1] else "OTHER BITS"
        print(f"both servers gave {same}")
        if answers[0] != answers[1]:
            sys.exit("demo: the two servers' answers differ")

    final = json.loads((run_folder / "final.json").read_text())
    say(f"Done in {time.monotonic() - began:.0f} s")
    print(
        f"test AUC {final['test']['auc']:.4f}; the generating model itself reaches "
        f"{json.loads(truth.read_text())['auc']:.4f}\n"
        f"report   {run_folder / 'report.html'}\n"
        f"package  {model} ({model.stat().st_size / 1e6:.1f} MB)\n"
        "next     tessera schema YOUR.csv --out data.yaml; tessera train --config data.yaml\n"
        "         make load-test      (locust against a server of its own)\n"
        "         README.md has the tour"
    )


if __name__ == "__main__":
    main()
