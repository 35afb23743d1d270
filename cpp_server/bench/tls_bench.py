"""What TLS costs: throughput of both servers in the clear, with TLS, and with client certificates and tokens.

    python cpp_server/bench/tls_bench.py [--rounds 5] [--seconds 3] [--json FILE]

The model is the DLRM of the forward benchmark: 26 int8 tables, D=64, 13 dense features.  Certificates have keys of the curve
P-256 and are made by openssl.  Client (tessera-load, one connection) and servers share this machine, so that a call's
throughput pays for TLS at both ends.  The ways take turns; every figure is the median over the rounds, and a ratio is
the median of the ratios that a way had to the same server in the clear in the same round.

Exit status: 0 every ratio is --at-least or more; 1 one is not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from server_bench import BUILD, Peer, logged_port, machine, measure, medians

from tessera.serving.bench.forward import dlrm
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model

LOADS = ((1, 1), (1, 64), (100, 32))
"""Samples of a request, requests in flight."""

PROGRAMS: dict[str, list[object]] = {
    "tessera-server": [BUILD / "tessera-server"],
    "tessera serve": [sys.executable, "-m", "tessera", "serve"],
}
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
_NAMES = b"subjectAltName=DNS:localhost,IP:127.0.0.1\n"


@dataclass(frozen=True)
class Way:
    """How a server is asked: its own flags and those of its client."""

    name: str
    server: list[object]
    client: list[str | Path]


def openssl(*words: object, told: bytes = b"") -> None:
    """Run openssl with ``told`` as its standard input."""
    command = ["openssl", *map(str, words)]
    done = subprocess.run(command, input=told, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.decode()}")


def make_ways(folder: Path) -> list[Way]:
    """In the clear, with TLS, and with client certificates and tokens; their files are written to ``folder``."""
    ca, ca_key = folder / "ca.pem", folder / "ca.key"
    authority = ("-subj", "/CN=authority", "-keyout", ca_key, "-out", ca)
    openssl("req", "-x509", *_CURVE, "-days", 30, *authority)
    for name in ("server", "client"):
        request, key, cert = (folder / f"{name}.{ending}" for ending in ("csr", "key", "pem"))
        openssl("req", *_CURVE, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        signing = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-extfile", "/dev/stdin")
        openssl("x509", "-req", "-in", request, *signing, "-days", 30, "-out", cert, told=_NAMES)
    token = folder / "token"
    token.write_text("token-of-this-benchmark\n")
    token.chmod(0o600)
    encrypted: list[object] = ["--tls-cert", folder / "server.pem"]
    encrypted += ["--tls-key", folder / "server.key"]
    shown: list[str | Path] = ["--tls-ca", ca, "--tls-cert", folder / "client.pem"]
    shown += ["--tls-key", folder / "client.key", "--token-file", token]
    # A busy machine makes calls wait, and a call that ends without an answer would end the measurement.
    patience: list[str | Path] = ["--timeout-ms", "60000"]
    shown += patience
    return [
        Way("clear", [], patience),
        Way("TLS", encrypted, ["--tls-ca", ca, *patience]),
        Way("mTLS, token", [*encrypted, "--tls-client-ca", ca, "--auth-token-file", token], shown),
    ]


def run(
    servers: dict[tuple[str, str], Peer], ways: list[Way], package: Path, args: argparse.Namespace
) -> tuple[list[dict[str, object]], float]:
    """Measure and print; the rows of the table, and the smallest ratio of throughput."""
    print(f"{machine()}; medians of {args.rounds} rounds of {args.seconds} s")
    print(f"{'':30} {'samples':>7} {'flight':>6} {'req/s':>8} {'p50 ms':>7} {'p99 ms':>7}", end="")
    print(f" {'CPU us':>7} {'req/s to clear':>14}")
    figures: list[dict[str, object]] = []
    smallest = 1.0
    for samples, in_flight in LOADS:
        rounds: dict[tuple[str, str], list[dict[str, float]]] = {key: [] for key in servers}
        for _ in range(args.rounds):
            for (name, way_name), server in servers.items():
                (client,) = (way.client for way in ways if way.name == way_name)
                row = measure(server, package, samples, in_flight, args.seconds, flags=client)
                rounds[name, way_name].append(row)
        for (name, way_name), rows in rounds.items():
            clear = [row["requests_per_second"] for row in rounds[name, "clear"]]
            rates = [row["requests_per_second"] for row in rows]
            ratio = statistics.median(a / b for a, b in zip(rates, clear, strict=True))
            smallest = min(smallest, ratio)
            row = medians(rows)
            figures.append(
                {"server": name, "way": way_name, "samples": samples, "ratio": ratio, **row}
            )
            print(
                f"{name + ', ' + way_name:30} {samples:7} {in_flight:6} {row['requests_per_second']:8.0f} "
                f"{row['p50_ms']:7.2f} {row['p99_ms']:7.2f} {row['cpu_us']:7.1f} {ratio:14.2f}",
                flush=True,
            )
    return figures, smallest


def main() -> int:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, default=100_000, help="per table (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="per load (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="of a round (default: %(default)s)"
    )
    parser.add_argument(
        "--at-least",
        type=float,
        default=0.6,
        help="throughput to that in the clear (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        package = folder / "dlrm.pt"
        write_model(dlrm(args.rows, "murmur3"), package, PackageOptions(name="dlrm"))
        ways = make_ways(folder)
        common: list[object] = ["--model", package, "--port", 0, "--http-port", 0]
        common += ["--drain-propagation-ms", 0]
        servers = {
            (name, way.name): stack.enter_context(
                Peer([*program, *common, *way.server], logged_port)
            )
            for name, program in PROGRAMS.items()
            for way in ways
        }
        figures, smallest = run(servers, ways, package, args)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "figures": figures}, indent=1))
    print(f"the smallest ratio is {smallest:.2f}; at least {args.at_least:g} is asked for")
    return 0 if smallest >= args.at_least else 1


if __name__ == "__main__":
    raise SystemExit(main())
