"""Runs the property tests several times, each time with examples that no run has drawn before.

``make test`` draws the same examples every time; this is where new ones are looked for.

    python tests/random_rounds.py --rounds 5
    python tests/random_rounds.py --rounds 1 --seed 123 tests/kernels    # a round again

Anything it does not know is pytest's.
"""

from __future__ import annotations

import argparse
import secrets
import shlex
import subprocess
import sys

NO_TESTS = 5  # pytest's exit status where nothing matched


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5, help="how many (default: 5)")
    parser.add_argument(
        "--seed", type=int, help="of the first round, from 0 (default: a new one); the next is +1"
    )
    known, rest = parser.parse_known_args()
    if known.rounds < 1:
        parser.error(f"--rounds is {known.rounds}; it must be at least 1")
    if known.seed is not None and known.seed < 0:
        parser.error(f"--seed is {known.seed}; it must not be negative")
    return known, rest


def main() -> int:
    options, rest = arguments()
    first = secrets.randbelow(2**31) if options.seed is None else options.seed
    failed = []
    for seed in range(first, first + options.rounds):
        print(f"round {seed - first + 1} of {options.rounds}, seed {seed}", flush=True)
        command = ["-m", "pytest", "-m", "hypothesis", "--hypothesis-profile=random"]
        command += [f"--hypothesis-seed={seed}", *rest]
        status = subprocess.run([sys.executable, *command], check=False).returncode
        if status == NO_TESTS:
            print("no property test is among those")
            return status
        if status:
            failed.append(seed)
    more = "".join(f" {shlex.quote(word)}" for word in rest)
    for seed in failed:
        print(f"failed; again: python tests/random_rounds.py --rounds 1 --seed {seed}{more}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
