"""``python -m tests.peers``: see the package's docstring."""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.conformance.conformance_harness import RunningServer, commands
from tests.peers import clients
from tests.peers.test_peers import kserve_case, requests_of


def attempt(client: Callable[..., str], *given: object) -> tuple[str, bool]:
    """What ``client`` says, and whether all was as expected."""
    try:
        return client(*given), True
    except AssertionError as failure:
        return f"FAILED {client}: {failure}", False


def main() -> int:
    parser = argparse.ArgumentParser(description="Clients by others against both servers.")
    parser.add_argument(
        "--python", action="append", default=[], help="another Python that has grpcio; repeatable"
    )
    parser.add_argument("--kserve", help="a Python that has the package kserve")
    parser.add_argument("--node-modules", help="a folder node_modules with @grpc/grpc-js")
    given = parser.parse_args()
    runs = [
        *(functools.partial(clients.grpcio, python=one) for one in (sys.executable, *given.python)),
        *clients.PROGRAMS.values(),
        *(client for client, lacks in clients.LIBRARIES.values() if not lacks()),
    ]
    if given.node_modules:
        runs.append(functools.partial(clients.grpc_js, modules=given.node_modules))
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        package, small, large = requests_of(Path(folder))
        for kind in commands():
            with RunningServer(kind, "--model", package, "--drain-propagation-ms", 0) as server:
                attempts = [(one, (server.address, small, large)) for one in runs]
                if given.kserve:
                    case = kserve_case(server, small)
                    kserve = (server.address, server.http_address, case, given.kserve)
                    attempts.append((clients.kserve, kserve))
                for one, arguments in attempts:
                    told, holds = attempt(one, *arguments)
                    failed += not holds
                    sys.stdout.write(f"{kind:8} {told}\n")
                    sys.stdout.flush()
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
