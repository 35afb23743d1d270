"""``python -m tests.rolling --server cpp``: shows it with the flags of deploy/kubernetes; see the package's docstring.

Exit status: 0 all held; 1 a call was lost, an answer was wrong, or a share came too late.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.conformance.conformance_harness import commands
from tests.deploy.manifests import DEPLOY, server_flags
from tests.rolling.fleet import Fleet, Load, wait_until

CALLS = 2_000
SHARE_LIMIT_S = 30


def tell(line):
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def fair_after_s(fleet, load):
    """The seconds until each server has its share, the counted calls included."""
    shares = {}

    def fair():
        nonlocal shares
        shares = load.shares(CALLS)
        return fleet.fair(shares)

    took_s = wait_until(fair)
    tell(f"  {took_s:5.1f} s: " + ", ".join(f"{n}: {s:.1%}" for n, s in sorted(shares.items())))
    return took_s


def main() -> int:
    parser = argparse.ArgumentParser(description="A rolling restart under load.")
    parser.add_argument("--server", choices=list(commands()), required=True)
    parser.add_argument("--rounds", type=int, default=3, help="rolling restarts (default: 3)")
    parser.add_argument("--threads", type=int, default=4, help="of the client (default: 4)")
    given = parser.parse_args()
    flags = server_flags(DEPLOY / "kubernetes/base/server.yaml")
    tell(f"{given.server}: {' '.join(flags)}")
    with (
        tempfile.TemporaryDirectory() as folder,
        Fleet(given.server, Path(folder), (1, 2, 3), *flags) as fleet,
    ):
        fleet.start(1, 2)
        with Load(fleet, threads=given.threads) as load:
            tell("two servers")
            began = time.monotonic()
            late = [fair_after_s(fleet, load)]
            tell("a third is added")
            fleet.start(3)
            late.append(fair_after_s(fleet, load))
            for turn in range(given.rounds):
                for number in (1, 2, 3):
                    tell(f"restart {turn + 1} of {number}")
                    status = fleet.restart(number)
                    late.append(fair_after_s(fleet, load) if status == 0 else float("inf"))
            calls, took_s = load.answered.total(), time.monotonic() - began
    tell(
        f"{calls} answers in {took_s:.0f} s ({calls / took_s:.0f} each second), {load.wrong} wrong"
    )
    tell(f"{load.failed.total()} calls failed: {dict(load.failed)}")
    tell(f"a server had its share after {max(late):.1f} s at most")
    return int(bool(load.failed or load.wrong or max(late) > SHARE_LIMIT_S))


if __name__ == "__main__":
    sys.exit(main())
