"""Logs of commits with something wrong in them, in front of a server that follows them while clients check every answer.

``python -m tests.attack.logs --server cpp --faults 10000`` spoils the next commit of a version again and again: it is missing,
repeated, out of order, cut, empty, changed in a bit, of another package or another chain, signed with another key, with other
answers, or stale after the log was rolled back; beside it lie the drafts of publishers that were killed. Each time the
server has to tell the reason, keep the state that it had, and take the right commit once it is there. Every
``--kill-every`` faults it is killed with SIGKILL and started again. What is held to:

* each answer has the bits of the whole package of the commit that it names, and no call fails but by a kill;
* each fault is noticed, once, for its own reason, and nothing of it is taken;
* calls are answered while a fault is there.

The summary tells how many faults of which kind there were. Anything that was not kept makes the exit status 1.
"""

from __future__ import annotations

import argparse
import collections
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tessera.serving.package.loading import load_package
from tessera.serving.package.signing import generate_keys, read_private_key, sign_package
from tessera.training.models.config import TableConfig
from tests.conformance.callers import Callers, commit_of
from tests.conformance.conformance_harness import RunningServer, commands
from tests.conformance.conftest import Drawn
from tests.conformance.followed_logs import FollowedVersion, History
from tests.conformance.live_models import asking, index
from tests.conformance.log_faults import Fault, Faults
from tests.package_factory import make_package

SIZES = (1, 3, 40)
STALE = Fault("stale after rollback", "fenced", lambda _: {})
FLAGS = ("--follow", "--follow-poll-ms", 5, "--max-batch-samples", 16, "--drain-propagation-ms", 0)
BETWEEN_CALLS_S = 0.03  # of each of two threads
TOLD_EVERY = 500


class _Told(NamedTuple):
    """What a server's metrics say of the log."""

    commit: int
    refused: int


def _told(server: RunningServer, reason: str) -> _Told:
    """The commit that is served, and how often one was refused for ``reason``.

    The page is looked at thousands of times: by its lines, which takes less than a parser of the whole format does.
    """
    _, page = server.http("/metrics")
    commit = re.search(r"^tessera_model_commit\{[^}]*\} (\S+)", page, re.MULTILINE)
    refused = re.search(
        rf'^tessera_commits_refused_total\{{[^}}]*reason="{reason}"[^}}]*\}} (\S+)',
        page,
        re.MULTILINE,
    )
    assert commit is not None
    return _Told(int(float(commit[1])), 0 if refused is None else int(float(refused[1])))


class Attack:
    """One server's log, and what became of the faults.

    Args:
        kind: ``cpp`` or ``python``.
        folder: for everything.
        seed: of faults and requests.
        commits: of the log; when it has come to its end, the next life begins with the first.

    Attributes:
        ends: faults by kind, and what was not kept.
    """

    def __init__(self, kind: str, folder: Path, seed: int, commits: int) -> None:
        self._kind = kind
        self._last = commits - 2  # the last that is spoilt; a missing one needs the one behind it
        self._draw = random.Random(seed)
        self._folder = folder
        keys = []
        for name in ("trusted", "other"):
            generate_keys(folder / name, folder / f"{name}.pub")
            keys.append(read_private_key(folder / name))
        made = [
            make_package(
                folder,
                name=name,
                num_dense=2,
                seed=number,
                features={"user": TableConfig(rows=1000)},
            )[0]
            for number, name in enumerate(("a", "b"))
        ]
        package = folder / "model.pt"
        sign_package(made[0], keys[0], package)
        self._history = History(folder / "right", package, commits, key=keys[0])
        self._faults = Faults(
            folder,
            self._history,
            key=keys[0],
            other_key=keys[1],
            other_package=made[1],
            seed=seed,
        )
        drawn = Drawn(load_package(package).manifest.schema, seed=seed)
        self._messages = [asking(drawn.samples(size), "m") for size in SIZES]
        self._right = [
            {number: self._history.expected(number, message) for number in range(commits + 1)}
            for message in self._messages
        ]
        self.ends: collections.Counter[str] = collections.Counter()

    def run(
        self, faults: int, kill_every: int, told: Callable[[str], None] = lambda _: None
    ) -> None:
        """Spoil so many commits; the server is killed after every ``kill_every`` of them.

        ``told`` is called with how far it has come, every `TOLD_EVERY` faults.
        """
        done = life = 0
        while done < faults:
            life += 1
            version = FollowedVersion(self._folder / f"life-{life}", self._history)
            version.put(1, self._history.commits[1])
            at = 1
            # Until the log has come to its end; a server that is started again replays it so far.
            while done < faults and at < self._last:
                until = min(done + kill_every, faults)
                with self._server(version) as server:
                    with Callers(
                        server,
                        self._messages,
                        self._right,
                        commit_of,
                        threads=2,
                        pause_s=BETWEEN_CALLS_S,
                    ) as callers:
                        while done < until and at < self._last:
                            at = self._spoil(server, version, at, callers)
                            done += 1
                            if done % TOLD_EVERY == 0:
                                told(f"{done} faults, {self.ends['kills']} kills")
                    self.ends["answers that were checked"] += callers.count()
                    self.ends["NOT KEPT: wrong answers"] += len(callers.wrong)
                    server.process.kill()
                    server.process.wait()
                self.ends["kills"] += 1

    def _server(self, version: FollowedVersion) -> RunningServer:
        keys = ("--require-signature", "--public-key", self._folder / "trusted.pub")
        return RunningServer(self._kind, "--model-repository", version.repository, *FLAGS, *keys)

    def _spoil(
        self, server: RunningServer, version: FollowedVersion, at: int, callers: Callers
    ) -> int:
        """One fault in front of the commit after ``at``, and its end; returns the commit that is served then."""
        fault = self._draw.choice([*self._faults.all, STALE])
        draft = self._history.commits[at + 1]
        draft = draft[: self._draw.randrange(len(draft))]
        (version.log / f".{at + 1:08d}.commit.{self._draw.randrange(1 << 20)}.partial").write_bytes(
            draft
        )
        before = _told(server, fault.reason)
        if fault is STALE:
            kept = at - 1
            version.fence({at: self._history.sha256(at)})
            version.put(at + 1, self._history.commits[at + 1])
        else:
            kept = at
            for number, content in fault.files(at + 1).items():
                version.put(number, content)
        words = f"commit {at + 1}: "
        server.wait_for(lambda: index(server)["m", "3"][1].startswith(words))
        server.wait_for(lambda: _told(server, fault.reason).refused > before.refused)
        told = _told(server, fault.reason)
        self._keep(told.commit == kept, f"{fault.name}: another state")
        times = told.refused - before.refused
        self._keep(times == 1, f"{fault.name}: refused {times} times")
        answers = callers.count()
        server.wait_for(lambda: callers.count() > answers)  # It goes on serving.
        if fault is STALE:
            version.fence({})
        version.put(at + 1, self._history.commits[at + 1])
        at += 2 if fault.name == "missing" else 1
        server.wait_for(lambda: index(server)["m", "3"] == ("READY", ""))
        server.wait_for(lambda: _told(server, fault.reason).commit == at)
        self.ends[fault.name] += 1
        return at

    def _keep(self, kept: object, what: str) -> None:
        if not kept:
            self.ends[f"NOT KEPT: {what}"] += 1


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", choices=list(commands()), required=True, help="which server")
    parser.add_argument("--faults", type=int, default=10_000, help="spoilt commits")
    parser.add_argument("--kill-every", type=int, default=90, help="faults between two kills")
    parser.add_argument("--commits", type=int, default=102, help="of the log, 4 or more")
    parser.add_argument("--seed", type=int, default=1, help="of faults and requests")
    given = parser.parse_args(arguments)
    if given.commits < 4:
        parser.error(f"--commits {given.commits}: give at least 4")
    return given


def attack(
    given: argparse.Namespace, folder: Path, told: Callable[[str], None] = lambda _: None
) -> collections.Counter[str]:
    """Everything; how many faults of which kind there were, and what was not kept."""
    attacked = Attack(given.server, folder, given.seed, given.commits)
    attacked.run(given.faults, given.kill_every, told)
    return attacked.ends


def summary(ends: collections.Counter[str]) -> int:
    """Print them; the exit status."""
    for end, count in sorted(ends.items()):
        if count:
            print(f"{count:>9}  {end}")
    bad = sum(count for end, count in ends.items() if end.startswith("NOT KEPT"))
    return 1 if bad else 0


def main() -> int:
    """The run that the flags ask for."""
    given = parse()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        status = summary(attack(given, Path(folder), lambda words: print(words, flush=True)))
    print(f"{'kept' if status == 0 else 'NOT kept'} in {time.monotonic() - begin:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
