"""A trainer, publishers of checkpoints and servers of one log are killed at random; the log goes on without a gap or a repeat.

``python -m tests.attack.log_lives --kills 200`` trains a small model that publishes each step, while servers of both kinds
(those that are built) follow the log and a client asks them without a pause.  One after the other, each at a random time,
are killed with SIGKILL:

* the trainer, which is resumed afterwards: while it starts, trains, commits, writes a checkpoint or describes it;
* ``tessera publish`` of the trainer's last checkpoint, while no trainer has the log;
* a server, which is started again and replays the log; now and then it is killed once more while it does.

After every ``--check-every`` kills the trainer is killed and its last checkpoint is published by a publisher that is left
alone.  What is held to then:

* the commits are numbered from 1 on without a gap, each builds on the one before, nothing is fenced off, and no draft of who
  was killed lies there any more;
* all servers come to the log's last commit, and give to each request the bits of the package with its commits;
* ``tessera compact`` makes, byte for byte, the package that ``package-model`` makes of the checkpoint;
* all servers come to that new version, and the trainer goes on with its log.

The client holds meanwhile that two answers that name the same version and commit are the same, whoever gave them and when.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import grpc

from tessera.cli import main as tessera
from tessera.serving.client import Draw, RequestDrawer, encode_request, read_schema
from tessera.serving.commits.chain import LOG_FOLDER, parse_commit_name
from tessera.serving.commits.fence import read_fence
from tessera.serving.commits.replay import replay
from tessera.serving.commits.state import VersionState
from tessera.serving.package.loading import load_package
from tessera.serving.packaging.commits.publish import version_folder
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.training.trainer.files import latest_checkpoint
from tests.attack.logs import summary
from tests.conformance.conformance_harness import RunningServer, commands
from tests.conformance.live_models import bits
from tests.conformance.test_answers import run_in_process
from tests.patience import PATIENCE_S
from tests.trainer.tiny_runs import TINY, write_criteo
from tests.training.ranks import process_context

MODEL = "ads"
REQUESTS = 8
PAUSE_S = 0.02
FLAGS = ("--follow", "--follow-poll-ms", 50, "--model-control", "poll", "--poll-s", 0.2)
FLAGS += ("--drain-propagation-ms", 0)
ENDLESS = ("train.epochs=1000000", "train.eval_every_steps=1000000")
KILLED = -9
# What a copy of the ready process imports otherwise, each time.
PRELOADED = (
    "tests.attack.logs",
    "tessera.training.trainer.run",
    "tessera.serving.packaging.commits.live",
)

Asked = tuple[str, int]
"""The version and the commit that an answer names."""


def _asked(answer: pb.PredictionResponse) -> Asked:
    return answer.model_version, answer.model_commit


class Command:
    """One ``tessera`` command in a process of its own, which begins with everything imported."""

    def __init__(self, said: Path, *arguments: object) -> None:
        self._said = said
        self.process: BaseProcess = process_context(*PRELOADED).Process(
            target=_run, args=([str(one) for one in arguments], said), daemon=True
        )
        self.process.start()

    def kill(self) -> bool:
        """End it with SIGKILL; whether it had not ended by itself."""
        self.process.kill()
        self.process.join()
        return self.process.exitcode == KILLED

    def end(self) -> int | None:
        """Wait for its end; its exit status."""
        self.process.join(PATIENCE_S)
        return self.process.exitcode

    def words(self) -> str:
        """What it has said."""
        return self._said.read_text() if self._said.exists() else ""


def _run(arguments: list[str], said: Path) -> None:
    with said.open("w") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    sys.exit(tessera(arguments))


class Client:
    """Asks one server after another for what it has by now, and remembers what each commit answered."""

    def __init__(self, requests: Sequence[pb.PredictionRequest]) -> None:
        self.answered = 0
        self.differing: list[tuple[int, Asked]] = []
        self.servers: dict[str, RunningServer] = {}
        self._requests = requests
        self._seen: dict[tuple[int, Asked], bytes] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        turn = 0
        while not self._end.wait(PAUSE_S):
            turn = (turn + 1) % len(self._requests)
            for server in list(self.servers.values()):
                # It may have been killed just now; whether it answers at other times, the checks tell.
                with contextlib.suppress(grpc.RpcError, ValueError):
                    answer = server.predict(self._requests[turn])
                    self.answered += 1
                    key = turn, _asked(answer)
                    if self._seen.setdefault(key, bits(answer)) != bits(answer):
                        self.differing.append(key)

    def close(self) -> None:
        """Ask no more."""
        self._end.set()
        self._thread.join()


class LogLives:
    """The log, who writes to it and who follows it.

    Args:
        folder: for everything.
        kinds: of servers.
        seed: of who is killed, and when.

    Attributes:
        ends: kills by their kind, and what was not kept.
    """

    def __init__(self, folder: Path, kinds: Sequence[str], seed: int) -> None:
        self._draw = random.Random(seed)
        self._folder, self._run, self._kinds = folder, folder / "run", kinds
        self._models = folder / "models"
        self._config = folder / "tiny.yaml"
        self.ends: collections.Counter[str] = collections.Counter()
        data = write_criteo(folder / "clicks.tsv", 300)
        text = TINY.replace("checkpoint_every_steps: 7", "checkpoint_every_steps: 20")
        self._config.write_text(text.replace("PATH", str(data)))
        first = folder / "first"
        self._models.mkdir()
        self._done("train", "--config", self._config, "--out", first, "--quiet", "train.epochs=1")
        self._done(
            "package-model", first, "--repository", self._models, "--name", MODEL, "--no-evaluate"
        )
        drawer = RequestDrawer(read_schema(self._version / "model.pt"), Draw(), seed=seed)
        contents = [encode_request(drawer.samples(size % 3 + 1)) for size in range(REQUESTS)]
        self._requests = [pb.PredictionRequest.FromString(content) for content in contents]
        self._client = Client(self._requests)
        self._servers: dict[str, RunningServer] = {}
        self._trainer: Command | None = None

    @property
    def _version(self) -> Path:
        return version_folder(self._models, MODEL, None)

    @property
    def _log(self) -> Path:
        return self._version / LOG_FOLDER

    @property
    def _checkpoint(self) -> Path | None:
        return latest_checkpoint(self._run / "checkpoints")

    def run(self, kills: int, check_every: int, told: Callable[[str], None] = print) -> None:
        """So many kills, and the checks between them and at the end; ``told`` of each check."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._client.close)
            stack.callback(self._stop_servers)
            stack.callback(self._stop_trainer)
            for kind in self._kinds:
                self._start_server(kind)
            self._start_trainer()
            self._wait_for_trainer(lambda: self._checkpoint is not None)
            for number in range(1, kills + 1):
                while not self._kill_one():
                    pass
                if number % check_every == 0 or number == kills:
                    self._check()
                    told(f"{number} kills, {self.ends['commits']} commits")
        self.ends["answers"] += self._client.answered
        self.ends["NOT KEPT: two answers of one commit differ"] += len(self._client.differing)

    def _kill_one(self) -> bool:
        """Kill somebody; whether there was somebody to be killed in time."""
        who = self._draw.choice([*["trainer"] * 5, *["publisher"] * 2, *self._kinds])
        if who == "publisher":
            return self._kill_publisher()
        if self._trainer is None:
            self._start_trainer()
        if self._draw.random() < 0.3:
            time.sleep(self._draw.uniform(0, 4))
        else:
            wanted = self._newest() + self._draw.randint(1, 12)
            self._wait_for_trainer(lambda: self._newest() >= wanted)
            time.sleep(self._draw.uniform(0, 0.5))
        if who == "trainer":
            self._stop_trainer()
        else:
            self._kill_server(who)
        return True

    def _done(self, *arguments: object) -> None:
        """Run a command, which has to succeed."""
        command = Command(self._folder / "command.log", *arguments)
        assert command.end() == 0, command.words()

    def _start_trainer(self) -> None:
        publish = ("--publish", self._models / MODEL, "--publish-every", "1steps")
        begun = (self._run / "config.yaml").exists()
        how = ("--resume",) if begun else ("--config", self._config, *ENDLESS)
        self._trainer = Command(
            self._folder / "trainer.log", "train", "--quiet", "--out", self._run, *publish, *how
        )

    def _stop_trainer(self) -> None:
        if self._trainer is not None:
            assert self._trainer.kill(), f"the trainer had ended:\n{self._trainer.words()}"
            self._trainer = None
            self.ends["kills of the trainer"] += 1

    def _wait_for_trainer(self, condition: Callable[[], bool]) -> None:
        """Until it has done something."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self._trainer is not None
            if not self._trainer.process.is_alive() or time.monotonic() > deadline:
                raise AssertionError(f"the trainer did no more:\n{self._trainer.words()}")
            time.sleep(0.01)

    def _newest(self) -> int:
        found = self._log.iterdir() if self._log.is_dir() else ()
        return max((parse_commit_name(path.name) or 0 for path in found), default=0)

    def _publish(self) -> list[object]:
        at = ("--repository", self._models, "--model", MODEL)
        return ["publish", self._checkpoint, *at, "--no-evaluate"]

    def _kill_publisher(self) -> bool:
        self._stop_trainer()  # a publisher needs the log for itself
        publisher = Command(self._folder / "publisher.log", *self._publish())
        publisher.process.join(self._draw.uniform(0, 3))
        if publisher.kill():
            self.ends["kills of a publisher"] += 1
            return True
        self.ends["publishers that ended"] += 1
        assert publisher.end() == 0, publisher.words()
        return False

    def _new_server(self, kind: str) -> RunningServer:
        return RunningServer(kind, "--model-repository", self._models, *FLAGS)

    def _start_server(self, kind: str) -> None:
        self._servers[kind] = self._new_server(kind).__enter__()
        self._client.servers[kind] = self._servers[kind]

    def _kill_server(self, kind: str) -> None:
        server = self._client.servers.pop(kind)
        self._keep(server.process.poll() is None, f"{kind} had ended by itself")
        server.kill()
        self.ends[f"kills of {kind}"] += 1
        if self._draw.random() < 0.3:
            server = self._new_server(kind)
            time.sleep(self._draw.uniform(0, 3))
            server.kill()
            self.ends[f"kills of {kind} that started"] += 1
        self._start_server(kind)

    def _stop_servers(self) -> None:
        self._client.servers.clear()
        for server in self._servers.values():
            server.__exit__()

    def _check(self) -> None:
        """What is held to; the trainer is dead, and the log's version is another one afterwards."""
        self._stop_trainer()
        self._done(*self._publish())
        folder, log = self._version, self._log
        state = VersionState(folder / "model.pt", MODEL, int(folder.name))
        broken = replay(state, log)
        self._keep(broken is None, f"the log is broken: {broken}")
        names = [path.name for path in log.iterdir()]
        numbers = sorted(filter(None, map(parse_commit_name, names)))
        self._keep(numbers == list(range(1, len(numbers) + 1)), "the numbers have a gap")
        self._keep(not read_fence(log).commits, "something is fenced off")
        self._keep(state.log.number == len(numbers), "the state is not that of the last commit")
        self._keep(not [name for name in names if name.startswith(".")], "drafts are left")
        expected = [run_in_process(_Loaded(state), one).tobytes() for one in self._requests]
        self._compare((folder.name, len(numbers)), expected)
        self.ends["commits"] += len(numbers)
        self._compact(expected)
        self.ends["checks"] += 1

    def _compact(self, expected: Sequence[bytes]) -> None:
        """The log becomes a version, which the servers are to take."""
        self._done("compact", "--repository", self._models, "--model", MODEL, "--prune")
        version = self._version.name
        whole = self._folder / "whole" / version
        whole.mkdir(parents=True)
        at = ("--repository", whole, "--name", MODEL, "--version", version)
        self._done("package-model", self._checkpoint, *at, "--no-evaluate")
        made = whole / MODEL / version / "model.pt"
        ours = self._version / "model.pt"
        self._keep(
            ours.read_bytes() == made.read_bytes(),
            "compact gives another package than package-model",
        )
        loaded = load_package(ours)
        found = [run_in_process(loaded, one).tobytes() for one in self._requests]
        self._keep(found == expected, "the compacted package has other bits than the log")
        self._compare((version, 0), expected)

    def _compare(self, asked: Asked, expected: Sequence[bytes]) -> None:
        """All servers come to that commit, and have its bits."""
        for kind, server in self._servers.items():
            server.wait_for(lambda s=server: _asked(s.predict(self._requests[0])) == asked)  # type: ignore[misc]
            found = [bits(server.predict(one)) for one in self._requests]
            self._keep(found == expected, f"{kind} has other bits than {'.'.join(map(str, asked))}")

    def _keep(self, kept: object, what: str) -> None:
        if not kept:
            self.ends[f"NOT KEPT: {what}"] += 1


class _Loaded:
    """A state as `run_in_process` calls a package."""

    def __init__(self, state: VersionState) -> None:
        self.runner = state


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--check-every", type=int, default=20, help="kills (default 20)")
    parser.add_argument("--seed", type=int, default=1, help="of who is killed, and when")
    return parser.parse_args(arguments)


def main() -> int:
    """The run that the flags ask for."""
    given = parse()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        lives = LogLives(Path(folder), list(commands()), given.seed)
        lives.run(given.kills, given.check_every)
        status = summary(lives.ends)
    print(f"{'kept' if status == 0 else 'NOT kept'} in {time.monotonic() - begin:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
