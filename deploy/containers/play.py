"""Goes through the steps of a Containerfile in plain folders, without a container engine, and runs what comes out.

    python deploy/containers/play.py deploy/containers/tessera.Containerfile --train
    python deploy/containers/play.py deploy/containers/tessera-server.Containerfile --model model.pt

Needs root and Debian's mmdebstrap (or --base with what `mmdebstrap --variant=minbase bookworm base.tar` made), which
stands for debian:bookworm-slim.  Each stage is a folder; RUN is a chroot with its own /proc.  What is checked of the last
one: no compiler and no pip, a user that is not root, and the entry point, which starts as that user on a root that
cannot be written, answers for --model on loopback, and ends with status 0 on SIGTERM.  An image that has `tessera` is asked
for scores by its own `tessera predict`, another one by the checkout's.

--train makes the package in the image itself, as its user: it generates data, trains on them and packages the model.
--keep FILE copies that package to this machine.  --steps takes the steps alone and does not look at what comes out.

--check looks at the steps without taking them, which needs neither root nor a network: that each instruction can be played,
that what is copied comes from an earlier stage, a wheel or the checkout, that the shell can read each RUN, and that the last
stage has an entry point and a user that is not root.

Machines that reach package registries by a mirror give --bind PATH (a file or folder that the steps see, too) and
--env NAME=VALUE (for RUN).  Takes minutes and 3 GB below --folder; each step is told with the seconds since the beginning.
Exit status: 0 it all holds; 1 the last line says what does not.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

BASE = "debian:bookworm-slim"
CONTEXT = Path(__file__).resolve().parents[2]
NOT_IN_AN_IMAGE = ("cc", "gcc", "g++", "c++", "clang", "ld", "make", "pip", "pip3")
_READY_S = 300
_BEGAN_S = time.monotonic()
_SET_UP = """
set -e
mount -t proc proc "$ROOT/proc"
for path in $BINDS; do
  if [ -d "$path" ]; then mkdir -p "$ROOT$path"; else mkdir -p "$ROOT${path%/*}"; touch "$ROOT$path"; fi
  mount --rbind -o ro "$path" "$ROOT$path"
done
"""
_READ_ONLY = """
mount --bind "$ROOT" "$ROOT"
mount -o remount,bind,ro "$ROOT"
mount -t proc proc "$ROOT/proc"
mount -t tmpfs tmpfs "$ROOT/tmp"
"""
# What --train does in the image, whose HOME can be written; the file lies in a folder of the host, at a place that the image's user can write.
_TRAINING = _READ_ONLY + 'mount --bind "$FILES" "$ROOT/models"\n'
_TRAIN = """
set -e
cd "$HOME"
config=$(echo /opt/tessera/lib/python3*/site-packages/tessera/training/configs/demo.yaml)
tessera datagen --rows 20000 --out clicks.tsv --seed 7
tessera train --config "$config" data.path=clicks.tsv train.epochs=1 --out run
package-model run --out /models/model.pt
"""


@dataclass
class Stage:
    """A stage's folder, and what its instructions have set.

    Attributes:
        root: the folder.
        variables: of ENV and of ARG with a value.
        user: of USER; empty: root.
        entry: of ENTRYPOINT.
    """

    root: Path
    variables: dict[str, str] = field(default_factory=dict)
    user: str = ""
    entry: list[str] = field(default_factory=list)


def instructions(file: Path) -> Iterator[tuple[str, str]]:
    """The instructions of ``file``, each a word and the rest of its line."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", file.read_text()))
    for line in filter(None, map(str.strip, joined.splitlines())):
        word, _, rest = line.partition(" ")
        yield word, rest


def say(text: str) -> None:
    """Tell what comes next, and when."""
    print(f"== {time.monotonic() - _BEGAN_S:5.1f} s  {text}", flush=True)


class Player:
    """Plays the instructions of one file.

    Args:
        folder: where stages are made.
        base: a tar of Debian's root.
        binds: paths of this machine that RUN sees.
        given: variables for RUN, and values of ARG.

    Attributes:
        files: a folder of the host, for what the image writes.
        last: the stage whose instructions are being played.
    """

    def __init__(self, folder: Path, base: Path, binds: list[str], given: dict[str, str]) -> None:
        self.files = folder / "files"
        self._folder = folder
        self._base = base
        self._binds = binds
        self._given = given
        self._stages: dict[str, Stage] = {}
        self.last = Stage(folder)

    def play(self, file: Path) -> Stage:
        """Go through ``file``; the last stage."""
        for word, rest in instructions(file):
            say(f"{word} {rest}")
            step = getattr(self, f"_{word.lower()}", None)
            if step is None:
                sys.exit(f"{file.name}: {word} is not an instruction that can be played")
            step(rest)
        return self.last

    def _from(self, rest: str) -> None:
        image, _, name = rest.partition(" AS ")
        if image != BASE:
            sys.exit(f"FROM {image} is not {BASE}, of which there is a root")
        root = self._folder / f"stage{len(self._stages)}"
        root.mkdir()
        subprocess.run(["tar", "-x", "-C", str(root), "-f", str(self._base)], check=True)
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
        self.last = self._stages[name or str(len(self._stages))] = Stage(root)

    def _arg(self, rest: str) -> None:
        name, has_default, default = rest.partition("=")
        if has_default or name in self._given:
            self.last.variables[name] = self._given.get(name, default)

    def _env(self, rest: str) -> None:
        name, _, value = rest.partition("=")
        self.last.variables[name] = value

    def _user(self, rest: str) -> None:
        self.last.user = rest

    def _expose(self, rest: str) -> None:
        """Say nothing: ports of the loopback are open."""

    def _entrypoint(self, rest: str) -> None:
        self.last.entry = json.loads(rest)

    def _copy(self, rest: str) -> None:
        words = shlex.split(rest)
        source = CONTEXT
        if words[0].startswith("--from="):
            source = self._stages[words.pop(0).removeprefix("--from=")].root
        *patterns, to = words
        target = self.last.root / to.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        for pattern in patterns:
            found = sorted(source.glob(pattern.lstrip("/")))
            if not found:
                sys.exit(f"COPY: there is no {pattern}; run make wheels")
            for path in found:
                if path.is_dir():
                    shutil.copytree(path, target, symlinks=True, dirs_exist_ok=True)
                else:
                    target.mkdir(exist_ok=True)
                    shutil.copy(path, target)

    def _run(self, rest: str) -> None:
        variables = self.last.variables | self._given
        done = self.start(self.last, ["/bin/sh", "-c", rest], _SET_UP, variables).wait()
        if done:
            sys.exit(f"RUN ended with {done}: {rest}")

    def start(
        self,
        stage: Stage,
        words: list[str],
        set_up: str,
        variables: dict[str, str],
        stderr: int | None = None,
    ) -> subprocess.Popen[str]:
        """Start a program in a stage, as the stage's user, in mounts of its own."""
        as_user = ""
        if stage.user:
            user, _, group = stage.user.partition(":")
            as_user = f"setpriv --reuid {user} --regid {group} --clear-groups --no-new-privs "
        paths = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        named = [f"{name}={value}" for name, value in (paths | variables).items()]
        command = shlex.join(["env", "-i", *named, *words])
        script = f"{set_up}\nexec chroot $ROOT {as_user}{command}"
        return subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script],
            env={
                "ROOT": str(stage.root),
                "BINDS": " ".join(self._binds),
                "FILES": str(self.files),
                **paths,
            },
            stderr=stderr,
            text=True,
        )


class Checker(Player):
    """Looks at the instructions of one file, and takes none of the steps that change or start something."""

    def __init__(self) -> None:
        super().__init__(CONTEXT, CONTEXT, [], {})

    def _from(self, rest: str) -> None:
        image, _, name = rest.partition(" AS ")
        if image != BASE:
            sys.exit(f"FROM {image} is not {BASE}, of which there is a root")
        self.last = self._stages[name or str(len(self._stages))] = Stage(CONTEXT)

    def _copy(self, rest: str) -> None:
        words = shlex.split(rest)
        if words[0].startswith("--from="):
            name = words[0].removeprefix("--from=")
            stage = self._stages.get(name)
            if stage is None or stage is self.last:
                sys.exit(f"COPY: there is no earlier stage {name}")
            return
        for pattern in words[:-1]:
            if not re.fullmatch(r"dist/tessera_rec\w*-\*\.whl", pattern) and not any(
                CONTEXT.glob(pattern)
            ):
                sys.exit(f"COPY: {pattern} is neither a wheel nor in the checkout")

    def _run(self, rest: str) -> None:
        read = subprocess.run(
            ["/bin/sh", "-n", "-c", rest], capture_output=True, text=True, check=False
        )
        if read.returncode:
            sys.exit(f"RUN cannot be read: {read.stderr.strip()}")


def check_user(stage: Stage) -> None:
    """Exit where the last stage has root for a user, or a name that a cluster cannot tell from it."""
    if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", stage.user):
        sys.exit(f"USER is {stage.user!r}; give the numbers of a user and a group, not root's")
    if not stage.entry:
        sys.exit("there is no ENTRYPOINT")


def check_files(stage: Stage) -> None:
    """Exit where the last stage has what it should not have."""
    found = [
        str(path)
        for name in NOT_IN_AN_IMAGE
        for folder in ("usr/bin", "usr/local/bin", "opt/tessera/bin")
        if (path := stage.root / folder / name).exists()
    ]
    if found:
        sys.exit(f"the last stage has {', '.join(found)}")
    check_user(stage)


def has_commands(stage: Stage) -> bool:
    """Whether the stage has `tessera`, and not tessera-server alone."""
    return (stage.root / "opt/tessera/bin/tessera").exists()


def train(player: Player, stage: Stage) -> Path:
    """Make a package in the last stage, as its user; the package's file."""
    if not has_commands(stage):
        sys.exit("the image has no tessera to train with; give --model")
    player.files.mkdir()
    shutil.chown(player.files, *map(int, stage.user.split(":")))
    (stage.root / "models").mkdir()
    say("train and package, in the image")
    done = player.start(stage, ["/bin/sh", "-c", _TRAIN], _TRAINING, stage.variables).wait()
    if done:
        sys.exit(f"training in the image ended with {done}")
    return player.files / "model.pt"


def check_server(player: Player, stage: Stage, model: Path) -> None:
    """Start the entry point, ask it, and end it; exit where it does not what it should."""
    (stage.root / "models").mkdir(exist_ok=True)
    shutil.copy(model, stage.root / "models/model.pt")
    (stage.root / "models/model.pt").chmod(0o644)
    flags = ["--model", "/models/model.pt", "--port", "0", "--http-port", "0"]
    say(" ".join([*stage.entry, *flags]))
    server = player.start(
        stage, [*stage.entry, *flags], _READ_ONLY, stage.variables, subprocess.PIPE
    )
    assert server.stderr is not None
    try:
        port = 0
        for line in server.stderr:
            print(line, end="")
            if line.startswith("{") and (entry := json.loads(line))["event"] == "ready":
                port = entry["port"]
                break
        if not port:
            sys.exit(f"the entry point ended with {server.wait(_READY_S)}")
        ask(player, stage, model, f"127.0.0.1:{port}")
        status = Path(f"/proc/{server.pid}/status").read_text(encoding="ascii")
        if re.search(r"(?m)^Uid:\s+0\b", status):
            sys.exit("the entry point runs as root")
        server.send_signal(signal.SIGTERM)
        if status_code := server.wait(_READY_S):
            sys.exit(f"the entry point ended with {status_code} after SIGTERM")
    finally:
        server.kill()


def ask(player: Player, stage: Stage, model: Path, address: str) -> None:
    """Ask a server for scores, by the image's own `tessera predict` or else the checkout's; exit where it has none."""
    say(f"tessera predict --address {address}")
    command = ["predict", "--address", address, "--random", "3", "--model-file"]
    if has_commands(stage):
        command = ["tessera", *command, "/models/model.pt"]
        done = player.start(stage, command, _READ_ONLY, stage.variables).wait()
    else:
        command = [sys.executable, "-m", "tessera", *command, str(model)]
        done = subprocess.run(command, check=False).returncode
    if done:
        sys.exit(f"tessera predict ended with {done}")


def main() -> int:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a Containerfile")
    parser.add_argument("--check", action="store_true", help="look at the steps alone")
    parser.add_argument("--steps", action="store_true", help="take the steps alone")
    parser.add_argument("--model", type=Path, help="a package to serve")
    parser.add_argument("--train", action="store_true", help="make the package in the image")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="where --train copies it to")
    parser.add_argument("--base", type=Path, metavar="TAR", help="Debian's root (default: make it)")
    parser.add_argument(
        "--bind", action="append", default=[], metavar="PATH", help="(default: none)"
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="(default: none)"
    )
    parser.add_argument("--folder", type=Path, help="for temporary files (default: the system's)")
    args = parser.parse_args()
    if args.check:
        check_user(Checker().play(args.file))
        print(f"{args.file.name}: every step can be played")
        return 0
    if sum([args.steps, args.train, args.model is not None]) != 1:
        parser.error("give one of --model, --train, --steps and --check")
    if args.keep is not None and not args.train:
        parser.error("--keep is for --train")
    with tempfile.TemporaryDirectory(prefix="tessera-play-", dir=args.folder) as name:
        base = args.base or Path(name) / "base.tar"
        if not args.base:
            subprocess.run(["mmdebstrap", "--variant=minbase", "bookworm", str(base)], check=True)
        given = dict(word.split("=", 1) for word in args.env)
        player = Player(Path(name), base, args.bind, given)
        stage = player.play(args.file)
        if not args.steps:
            check_files(stage)
            model = args.model or train(player, stage)
            check_server(player, stage, model)
            if args.keep is not None:
                args.keep.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(model, args.keep)
    what = (
        "every step was played" if args.steps else "every step was played, and its server answers"
    )
    print(f"{args.file.name}: {what} ({time.monotonic() - _BEGAN_S:.0f} s)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
