"""Runs floods against a server and prints what a polite client saw beside each.

``--server python|cpp`` starts one of this repository's servers with a small package; ``--address`` takes one that is
there (``--pid`` for its memory and descriptors, ``--model-file`` for a valid request).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

from tessera.serving.package.loading import load_package
from tests.attack.attacking import FLOODS, Server, attack, settled
from tests.attack.watching import PoliteClient
from tests.conformance.conformance_harness import RunningServer
from tests.conformance.conftest import Drawn
from tests.package_factory import make_package

MIB = 1 << 20
FLAGS = ("--max-inflight-bytes", 24 * MIB, "--max-message-bytes", 8 * MIB)
P99_S = {"cpp": 0.1, "python": 0.3}
"""What the polite client's p99 is held against on a quiet machine."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.attack",
        description=(__doc__ or "").split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--server", choices=["python", "cpp"], help="the server to start")
    where.add_argument("--address", help="HOST:PORT of the gRPC port of one that is there")
    parser.add_argument("--http-address", help="HOST:PORT of its HTTP port; with --address")
    parser.add_argument("--pid", type=int, help="its process; with --address")
    parser.add_argument("--model-file", type=Path, help="the package it serves; with --address")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each flood lasts")
    parser.add_argument("--settle-s", type=float, default=10.0, help="time to come back to rest")
    parser.add_argument(
        "--timeout-s", type=float, default=20.0, help="of the polite client's calls"
    )
    parser.add_argument("--memory-mib", type=int, default=288, help="what the server may grow by")
    parser.add_argument("floods", nargs="*", metavar="FLOOD", help=f"of {', '.join(FLOODS)}")
    given = parser.parse_args()
    unknown = set(given.floods) - set(FLOODS)
    if unknown:
        parser.error(f"unknown floods {sorted(unknown)}; there are {', '.join(FLOODS)}")
    needed = ("http_address", "pid", "model_file")
    if given.address and None in [getattr(given, name) for name in needed]:
        parser.error("--address needs --http-address, --pid and --model-file")
    return given


@contextlib.contextmanager
def target(given: argparse.Namespace, folder: Path):
    package = given.model_file or make_package(folder)[0]
    request = folder / "request"
    message = Drawn(load_package(package).manifest.schema).samples(1)
    request.write_bytes(message.SerializeToString())
    if given.address:
        yield Server(given.address, given.http_address, given.pid, request)
        return
    with RunningServer(given.server, "--model", package, *FLAGS) as server:
        yield Server(server.address, server.http_address, server.process.pid, request)


def main() -> int:
    given = parse()
    bound_s = P99_S.get(given.server, P99_S["cpp"])
    failed = 0
    with tempfile.TemporaryDirectory() as folder, target(given, Path(folder)) as server:
        client = PoliteClient(
            server.address, server.request.read_bytes(), timeout_s=given.timeout_s
        )
        print(
            f"{'flood':28}{'MiB':>7}{'conns':>7}{'calls':>7}{'p50 ms':>8}{'p99 ms':>8}{'worst':>8}"
            f"{'+MiB':>7}{'fds':>6}  verdict"
        )
        for name in given.floods or FLOODS:
            outcome = attack([name], server, client, given.seconds)
            calls = sum(outcome.ends.values())
            back = settled(
                server,
                outcome.before,
                bytes_more=given.memory_mib * MIB,
                within_s=given.settle_s,
            )
            faults = [
                *(f"{count} x {end}" for end, count in outcome.ends.items() if end != "OK"),
                *(["p99 above the bound"] if outcome.p99_s > bound_s else []),
                *(["memory"] if outcome.grew_bytes > given.memory_mib * MIB else []),
                *([] if back else ["memory or descriptors did not come back"]),
            ]
            failed += bool(faults)
            print(
                f"{name:28}{outcome.sent_bytes / MIB:7.1f}{outcome.connections:7}{calls:7}"
                f"{1e3 * outcome.median_s:8.1f}{1e3 * outcome.p99_s:8.1f}{1e3 * outcome.worst_s:8.0f}"
                f"{outcome.grew_bytes / MIB:7.0f}{outcome.most.descriptors:6}  "
                f"{'; '.join(faults) or 'ok'}",
                flush=True,
            )
        client.close()
    print(f"{failed} of {len(given.floods or FLOODS)} floods did more than they may")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
