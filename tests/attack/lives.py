"""Fifty models of three versions live and die at random while clients check each answer against the version it names.

``python -m tests.attack.lives --server cpp --calls 1000000 --limit-s 1200`` keeps one server of a repository busy from
client processes until that many calls were answered.  Meanwhile versions are loaded, unloaded, labelled and
rolled back, their folders deleted and put back, their files damaged and mended; and the server is killed with SIGKILL and
started again, with --model-control explicit or poll by turns.  What is held to:

* an answer has the bits of the version that it names, which is the version that was asked for;
* NOT_FOUND names what was asked for, and says which versions there are; UNAVAILABLE names the version that should be
  there and is not;
* between the end of a call that loads or unloads a version and the next change of its model, that version is always
  answered, or never;
* a call that changed something has changed it when it returns; one that is refused says NOT_FOUND or
  FAILED_PRECONDITION;
* what calls had changed holds after the server was killed and started;
* one model in ten always keeps a good version, and requests to it without a version are always answered.

The summary tells how calls and changes ended.  Anything lost, wrong or broken, or fewer calls than were asked for
within the time, makes the exit status 1.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import grpc

from tests.attack.certain import Certain
from tests.attack.faults import BROKEN, free_ports, is_bad, make_answers
from tests.attack.life_calls import AWAY, LABELS, LOST, OK, WRONG, Clients, World
from tests.attack.watching import PREDICT, footprint
from tests.conformance.conformance_harness import commands, start_server
from tests.conformance.live_models import Models, load, unload
from tests.package_factory import make_package

PACKAGES = 5
VERSIONS = (1, 2, 3)
KEPT = 1
"""The version that a steady model always keeps."""
READY_S = 180.0
CALL_S = 60.0
MENDING = 0.75
"""How often a change of a model's files mends one that is spoiled, where there is one."""
NOTICED_S = 2.0
"""How long after an answer a client may look at it."""
REFUSALS = {"NOT_FOUND", "FAILED_PRECONDITION"}
CHANGES = ("load", "load", "label", "label", "unload", "unload_all", "rollback", "delete", "damage")
GONE = {"NOT_FOUND", "UNAVAILABLE"}


class Life:
    """One model as its keeper knows it: what lies in its folder and what calls have made of it."""

    def __init__(self, name: str, *, steady: bool) -> None:
        self.name, self.steady = name, steady
        self.lock = threading.Lock()
        self.good = set(VERSIONS)  # whole in the folder
        self.labels: dict[str, int] = {}  # as the last calls that returned have set them
        self.sure = True  # whether every call since then has returned
        self.unloaded = False


class Keeper:
    """The server, its repository and everything that happens to them."""

    def __init__(
        self, kind: str, models: Models, world: World, lives: Sequence[Life], draw
    ) -> None:
        self._kind, self._models, self._world, self._lives = kind, models, world, lives
        self._draw = draw
        self._lock = threading.Lock()
        self.ends: collections.Counter[str] = collections.Counter()
        self._http_port = free_ports()[1]
        self._control = "explicit"
        self._log = models.folder.parent / "log"
        self._ending = False
        self.channel = None
        self._away_since = 0.0
        self._away: list[tuple[float, float]] = []
        self.most_bytes = 0
        self.certain = Certain()

    def _count(self, end: str) -> None:
        with self._lock:
            self.ends[end] += 1

    def start(self) -> None:
        """A server that is ready; `RuntimeError` where it does not become so."""
        port = self._world.address.rpartition(":")[2]
        with self._log.open("wb") as log:
            flags = ["--model-repository", self._models.folder, "--model-control", self._control]
            flags += ["--poll-s", 0.2, "--host", "127.0.0.1", "--port", port]
            flags += ["--http-port", self._http_port, "--log-level", "warning"]
            self._process = start_server(self._kind, flags, stderr=log)
        until = time.monotonic() + READY_S
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(OSError):
                url = f"http://127.0.0.1:{self._http_port}/readyz"
                with urllib.request.urlopen(url, timeout=1):
                    self._connect()
                    return
            time.sleep(0.02)
        raise RuntimeError(f"the server did not become ready; its log:\n{self._tail()}")

    def _connect(self) -> None:
        if self.channel is not None:
            self.channel.close()
        self.channel = grpc.insecure_channel(
            self._world.address, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self._ending = False
        self._away.append((self._away_since, time.monotonic() + NOTICED_S))

    def was_away(self, time_s: float) -> bool:
        """Whether the server was ended, or not ready yet, when a client saw a refusal."""
        return any(begin <= time_s <= end for begin, end in self._away)

    def _tail(self) -> str:
        return self._log.read_text(errors="backslashreplace")[-2_000:]

    def stop(self, number: int) -> None:
        """End the server by a signal."""
        if (status := self._process.poll()) is not None:
            self._count(f"{BROKEN}: the server ended by itself with status {status}")
            print(self._tail(), file=sys.stderr)
        else:
            held = footprint(self._process.pid).resident_bytes
            self.most_bytes = max(self.most_bytes, held)
        self._ending = True
        self._away_since = time.monotonic()
        self._process.send_signal(number)
        status = self._process.wait(READY_S)
        if number == signal.SIGTERM and status != 0:
            self._count(f"{BROKEN}: status {status} after SIGTERM")

    def kill(self) -> None:
        """SIGKILL at a moment of its own, a start under the other control, and what must still hold."""
        self.stop(signal.SIGKILL)
        # Calls that were under way may have been done or not; their threads see the connection's end.
        with contextlib.ExitStack() as stack:
            for life in self._lives:
                stack.enter_context(life.lock)
                self.certain.end(life.name, self._away_since)
            self._control = "poll" if self._control == "explicit" else "explicit"
            self.start()
            self._count(f"killed, and started with {self._control}")
            for life in self._lives:
                self._check_labels(life)
                life.sure = True

    def _check_labels(self, life: Life) -> None:
        if not life.sure:
            life.labels = {}
        for label, version in life.labels.items():
            if version in life.good and not life.unloaded:
                self._expect(life, label, str(version), "after a start")

    def change(self) -> None:
        """One change of one model, and whether it holds."""
        life = self._draw.choice(self._lives)
        name = self._draw.choice(CHANGES)
        version = self._draw.choice(VERSIONS)
        with life.lock:
            self.certain.end(life.name, time.monotonic())
            if name in {"delete", "damage"}:
                self._spoil(life, version, name)
            elif self._control == "explicit":
                self._call(life, name, version)
        time.sleep(0.5 if self._ending else 0.02)

    def _spoil(self, life: Life, version: int, how: str) -> None:
        """Take a version's file away or damage it; or, where that was done, make it whole again.

        Where a version of the model is spoiled, mending comes three times as often as spoiling another one.
        """
        spoiled = sorted(set(VERSIONS) - life.good)
        if spoiled and self._draw.random() < MENDING:
            version = self._draw.choice(spoiled)
        if life.steady and version == KEPT:
            return
        package = self._world.contents[life.name][version]
        if version not in life.good:
            if self._models.path(life.name, version).exists():
                content = self._models.content(package)
                self._models.replace(life.name, version, content)
            else:
                self._models.put(life.name, version, package)
            life.good.add(version)
        elif how == "delete":
            life.good.discard(version)
            self._models.remove(life.name, version)
        else:
            life.good.discard(version)
            content = bytearray(self._models.content(package))
            content[self._draw.randrange(len(content))] ^= 1
            self._models.replace(life.name, version, bytes(content))
        self._count(f"{how}, or mended")

    def _call(self, life: Life, name: str, version: int) -> None:
        if life.steady and (name == "unload_all" or (name == "unload" and version == KEPT)):
            return
        label = self._draw.choice(LABELS)
        was_sure, life.sure = life.sure, False
        try:
            if name == "load":
                load(self, life.name, version=version)
            elif name == "label":
                load(self, life.name, version=version, label=label)
            elif name == "rollback":
                load(self, life.name, rollback=KEPT if life.steady else "previous")
            elif name == "unload":
                unload(self, life.name, version=version)
            else:
                unload(self, life.name)
        except grpc.RpcError as error:
            self._refused(life, name, error)
            life.sure = was_sure and error.code().name in REFUSALS
            return
        life.sure = was_sure
        self._count(f"{name}: done")
        self._hold(life, name, version, label)

    def _refused(self, life: Life, name: str, error: grpc.RpcError) -> None:
        code, why = error.code().name, (error.details() or "").splitlines()[0][:150]
        if code in REFUSALS:
            self._count(f"{name}: {code}")
        elif self._ending:
            self._count(f"{name}: the server was killed")
        else:
            self._count(f"{BROKEN}: {name} of {life.name}: {code} {why}")

    def _hold(self, life: Life, name: str, version: int, label: str) -> None:
        """What a call has changed must hold when it has returned, and until the next change."""
        if name != "rollback":
            changed = VERSIONS if name == "unload_all" else (version,)
            there = name in {"load", "label"}
            self.certain.begin(life.name, changed, time.monotonic(), there=there)
        if name in {"load", "label"}:
            life.unloaded = False
            self._expect(life, str(version), str(version), name)
        if name == "label":
            life.labels[label] = version
            self._expect(life, label, str(version), name)
        elif name == "unload":
            self._expect(life, str(version), None, name)
        elif name == "unload_all":
            life.unloaded = True
            self._expect(life, "", None, name)
        elif name == "rollback":
            life.unloaded = False
            life.labels.pop("stable", None)  # which version that was, the answer says
            life.labels["stable"] = int(self._answering(life, "stable") or KEPT)

    def _answering(self, life: Life, asked: str) -> str | None:
        """The version that answers; None: none does."""
        turn = self._draw.randrange(len(self._world.requests))
        call = self.channel.unary_unary(PREDICT)
        try:
            answer = call(self._world.message(turn, life.name, asked), timeout=CALL_S)
        except grpc.RpcError as error:
            if error.code().name in GONE:
                return None
            raise
        return self._world.version_of(answer)

    def _expect(self, life: Life, asked: str, version: str | None, after: str) -> None:
        try:
            found = self._answering(life, asked)
        except grpc.RpcError as error:
            if not self._ending:
                self._count(f"{BROKEN}: {error.code().name} {error.details()}"[:200])
            return
        if found != version and not self._ending:
            what = f"version {asked!r} of {life.name} is answered by {found}, not {version}"
            self._count(f"{BROKEN}: {after}: {what}")


def make_world(folder: Path, models: int, seed: int) -> tuple[Models, World]:
    """A repository of ``models`` models, each version a copy of one of a few packages."""
    packages = {
        str(number): make_package(folder, name=f"package{number}", seed=seed + number)[0]
        for number in range(PACKAGES)
    }
    answers = {name: make_answers(path, seed) for name, path in packages.items()}
    requests = [content for content, _ in answers["0"]]
    assert all([content for content, _ in found] == requests for found in answers.values())
    names = [f"m{number}" for number in range(models)]
    repository = Models(folder / "models", packages)
    contents = {
        name: {version: str((number + 2 * version) % PACKAGES) for version in VERSIONS}
        for number, name in enumerate(names)
    }
    for name, versions in contents.items():
        for version, package in versions.items():
            repository.put(name, version, package)
    for name in names[::2]:
        repository.settings(name, versions="all")
    world = World(
        address=f"127.0.0.1:{free_ports()[0]}",
        contents=contents,
        requests=requests,
        right={name: [right for _, right in found] for name, found in answers.items()},
        steady=frozenset(names[::10]),
    )
    return repository, world


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", choices=list(commands()), required=True, help="which server")
    parser.add_argument("--calls", type=int, default=1_000_000, help="answered calls to reach")
    parser.add_argument("--limit-s", type=float, default=1_800, help="the longest time for them")
    parser.add_argument("--models", type=int, default=50, help="models of three versions")
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument("--kill-every-s", type=float, default=20, help="seconds between kills")
    parser.add_argument("--seed", type=int, default=1, help="of requests and changes")
    return parser.parse_args(arguments)


def live(given: argparse.Namespace, folder: Path) -> collections.Counter[str]:
    """Everything, until enough calls were answered; how calls and changes ended."""
    draw = random.Random(given.seed)
    models, world = make_world(folder, given.models, given.seed)
    lives = [Life(name, steady=name in world.steady) for name in world.contents]
    keeper = Keeper(given.server, models, world, lives, draw)
    keeper.start()
    clients = Clients(world, given.clients, given.seed)
    ended = threading.Event()

    def change_until_the_end() -> None:
        while not ended.is_set():
            keeper.change()

    changers = [threading.Thread(target=change_until_the_end) for _ in range(2)]
    for changer in changers:
        changer.start()
    until = time.monotonic() + given.limit_s
    kill_at = time.monotonic() + given.kill_every_s
    while clients.listen() < given.calls and time.monotonic() < until:
        time.sleep(0.1)
        if time.monotonic() > kill_at:
            keeper.kill()
            kill_at = time.monotonic() + draw.uniform(0.5, 1.5) * given.kill_every_s
    ended.set()
    for changer in changers:
        changer.join()
    clients.stop()
    keeper.stop(signal.SIGTERM)
    print(f"most resident memory at an end: {keeper.most_bytes >> 20} MiB")
    refused = collections.Counter(
        AWAY if keeper.was_away(time_s) else f"{LOST}: {why}" for time_s, why in clients.refused
    )
    held, faults = keeper.certain.faults(clients.calls)
    print(f"calls of versions that were there, or not, for certain: {held}")
    wrong = collections.Counter({f"{WRONG}: {fault}": count for fault, count in faults.items()})
    return clients.ends + keeper.ends + refused + wrong


def summary(given: argparse.Namespace, ends: collections.Counter[str]) -> int:
    """Print how calls and changes ended; the exit status."""
    for end, count in sorted(ends.items()):
        print(f"{count:>9}  {end}")
    bad = sum(count for end, count in ends.items() if is_bad(end))
    kept = bad == 0 and ends[OK] >= given.calls
    print(
        f"{'kept' if kept else 'NOT kept'}: {bad} bad, {ends[OK]} of {given.calls} answered rightly"
    )
    return 0 if kept else 1


def main() -> int:
    """The run that the flags ask for."""
    given = parse()
    with tempfile.TemporaryDirectory() as folder:
        return summary(given, live(given, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
