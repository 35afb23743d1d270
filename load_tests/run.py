"""Locust without a screen: start a server if none is given, load it, say what came out.

    python load_tests/run.py                                   # a server of its own
    python load_tests/run.py --address HOST:PORT --model-file MODEL.pt

``make load-test`` runs the first form.  Without --model-file it takes the package that
``make demo`` left in .demo/, or else makes one of the same shape with random weights.

Writes report.html (locust's report, self-contained), result.json, locust.log and, with a server
of its own, server.log into --out.  Exits with 1 if a call failed or the server did not drain.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tessera.errors import UserError
from tessera.serving.client import read_schema
from tessera.serving.client.codec import check_address

HERE = Path(__file__).resolve().parent
DEMO_PACKAGE = HERE.parent / ".demo" / "model.pt"


class LoadTestError(Exception):
    """The load test could not be carried out; the message says why."""


@contextlib.contextmanager
def own_server(model: Path, log: Path) -> Iterator[str]:
    """``tessera serve`` on free ports of this machine; yields its address.

    Raises:
        LoadTestError: it did not become ready, or did not drain after SIGTERM.
    """
    # Brings torch, which a test of somebody else's server does without.
    from tessera.serving.server.background import ServerProcess  # noqa: PLC0415

    try:
        with ServerProcess(["--model", str(model)]) as server:
            yield server.address
            status = server.terminate()
        log.write_text("".join(json.dumps(entry) + "\n" for entry in server.log))
    except UserError as error:
        raise LoadTestError(str(error)) from error
    except subprocess.TimeoutExpired as error:
        raise LoadTestError("the server did not end after SIGTERM and was killed") from error
    if status:
        raise LoadTestError(f"the server ended with exit status {status}; see {log}")


def random_package(path: Path) -> Path:
    """A DLRM with 13 dense and 26 sparse features and random weights; made once."""
    if not path.exists():
        from tessera.serving.bench.forward import dlrm  # noqa: PLC0415 - brings torch
        from tessera.serving.packaging.options import (  # noqa: PLC0415 - brings torch
            PackageOptions,
        )
        from tessera.serving.packaging.package import write_model  # noqa: PLC0415 - likewise

        print(f"making {path}: random weights, the shape of the demo's model", flush=True)
        write_model(dlrm(10_000, "murmur3"), path, PackageOptions(name="random"))
    return path


def run_locust(args: argparse.Namespace, address: str, model: Path) -> int:
    """Run locust headless; returns its exit status: 0, or 1 if a call failed."""
    command = [sys.executable, "-m", "locust", "-f", str(HERE / "locustfile.py"), "--headless"]
    command += ["--host", address, "--model-file", str(model), "--model-name", args.model]
    command += ["--candidates", str(args.candidates), "--timeout-ms", str(args.timeout_ms)]
    command += ["--users", str(args.users), "--spawn-rate", str(args.users)]
    command += ["--run-time", f"{args.run_time_s}s", "--only-summary", "--reset-stats"]
    command += ["--html", str(args.out / "report.html")]
    command += ["--result", str(args.out / "result.json")]
    with (args.out / "locust.log").open("w") as log:
        # Many users in one thread want no OpenMP threads beside them.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, check=False, stderr=log, stdin=subprocess.DEVNULL, env=environment
        ).returncode


def summary(out: Path) -> str:
    """What locust measured, as a few lines.

    Raises:
        LoadTestError: locust did not finish, or no call was made.
    """
    try:
        result = json.loads((out / "result.json").read_text())
    except FileNotFoundError as error:
        raise LoadTestError(f"locust did not finish; see {out / 'locust.log'}") from error
    if not result["calls"]:
        raise LoadTestError(f"locust made no call; see {out / 'locust.log'}")
    lines = [f"{'':<38} {'calls/s':>9} {'p50 ms':>7} {'p99 ms':>7} {'max ms':>7} {'failed':>7}"]
    lines += [
        f"{row['name']:<38} {row['calls_per_s']:>9.1f} {row['p50_ms']:>7.0f} {row['p99_ms']:>7.0f}"
        f" {row['max_ms']:>7.0f} {row['failures']:>7}"
        for row in result["calls"]
    ]
    lines += [
        f"failed: {row['calls']} x {row['name']}: {row['error']}" for row in result["failures"]
    ]
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parser of this program's flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--address", metavar="HOST:PORT", help="a running server (default: start one)")
    add(
        "--model-file",
        type=Path,
        metavar="MODEL.pt",
        help="the served package (default: .demo/model.pt, or random weights)",
    )
    add("--model", default="", help="the model's name at the server (default: its first)")
    add("--users", type=int, default=32, help="concurrent users (default: %(default)s)")
    add("--run-time-s", type=int, default=20, help="seconds under load (default: %(default)s)")
    add(
        "--candidates",
        type=int,
        default=100,
        help="candidates of a ranking request, on average (default: %(default)s)",
    )
    add("--timeout-ms", type=int, default=1000, help="of a call (default: %(default)s ms)")
    add(
        "--out",
        type=Path,
        default=Path("bench-out/load-test"),
        help="folder for what is written (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    for flag in ("users", "run_time_s", "candidates", "timeout_ms"):
        if getattr(args, flag) < 1:
            parser.error(
                f"--{flag.replace('_', '-')} must be at least 1, not {getattr(args, flag)}"
            )
    if args.model_file is not None and not args.model_file.is_file():
        parser.error(f"--model-file {args.model_file} does not exist")
    if args.address and args.model_file is None and not DEMO_PACKAGE.is_file():
        parser.error("--address needs --model-file MODEL.pt: the package that is served there")
    try:
        if args.address:
            check_address(args.address)
        if args.model_file is not None:
            read_schema(args.model_file)
        args.out.mkdir(parents=True, exist_ok=True)
    except UserError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--out {args.out}: {error.strerror}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run and report; returns the exit status."""
    args = parse(argv)
    for name in ("result.json", "report.html"):
        (args.out / name).unlink(missing_ok=True)
    if args.model_file is not None:
        model = args.model_file
    elif DEMO_PACKAGE.is_file():
        model = DEMO_PACKAGE
    else:
        model = random_package(args.out / "random.pt")
    try:
        with contextlib.ExitStack() as stack:
            address = args.address
            if not address:
                address = stack.enter_context(own_server(model, args.out / "server.log"))
            print(f"{args.users} users, {args.run_time_s} s, {address}, {model}", flush=True)
            status = run_locust(args, address, model)
            print(summary(args.out))
            print(f"report: {args.out / 'report.html'}", flush=True)
    except LoadTestError as error:
        print(f"load test: {error}", file=sys.stderr)
        return 1
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
