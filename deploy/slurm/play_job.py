"""Goes through train.sbatch with a Slurm of its own: two nodes on this machine, in a folder, without a cluster.

    python deploy/slurm/play_job.py

Needs root, the programs of Debian's package slurm-wlm, and `tessera` and `torchrun` on the path.  A job trains on two
nodes and finishes; a second job finds it finished.  Another trains until its time limit is near, is queued again, goes on
from its checkpoint, and is cancelled.  Messages are not authenticated and the ports are those below, so no other Slurm may run here.
Takes some four minutes.  Exit status: 0 it all holds; 1 the last line says what does not.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent / "train.sbatch"
NODES = ("n1", "n2")
PORTS = {"slurmctld": 16817, "n1": 17001, "n2": 17002}
_LIMIT_S = 600
_CONFIG = """
ClusterName=play
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={PORTS[slurmctld]}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={PORTS[n1]} CPUs={cpus}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={PORTS[n2]} CPUs={cpus}
PartitionName=play Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """What a command prints; exit where it fails."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{command[0]} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def wait_for(what: str, holds: Callable[[], bool]) -> None:
    """Until ``holds()``, or exit."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > _LIMIT_S:
            sys.exit(f"{what}: not within {_LIMIT_S} s")
        time.sleep(0.5)
    print(f"{time.monotonic() - began:6.1f} s: {what}", flush=True)


@contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """A controller and two nodes; the variable SLURM_CONF leads to them."""
    config = folder / "slurm.conf"
    values = {"host": socket.gethostname(), "folder": folder, "cpus": os.cpu_count()}
    config.write_text(_CONFIG.format(PORTS=PORTS, **values))
    os.environ["SLURM_CONF"] = str(config)
    commands = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)]
    with (folder / "daemons.log").open("w") as log:
        daemons = [subprocess.Popen(words, stdout=log, stderr=log) for words in commands]
        try:
            wait_for("both nodes are idle", lambda: idle_nodes(daemons) == len(NODES))
            yield
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait()


def idle_nodes(daemons: list[subprocess.Popen[bytes]]) -> int:
    """How many nodes take jobs; exit where a daemon has ended."""
    for daemon in daemons:
        if daemon.poll() is not None:
            sys.exit(f"{daemon.args!r} ended with {daemon.returncode}")
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-t", "idle"], capture_output=True, text=True, check=False
    )
    return len(done.stdout.splitlines())


def fact(job: str, name: str) -> str:
    """What Slurm says of a job."""
    found = re.search(rf"\b{name}=(\S+)", run("scontrol", "show", "job", job))
    return found[1] if found else ""


def submit(folder: Path, out: str, *flags: str, epochs: int = 1) -> str:
    """Submit the script for the run ``out``; the job's number."""
    keys = ("data.path=clicks.tsv", f"train.epochs={epochs}", f"train.patience={epochs}")
    command: list[str | Path] = [
        "sbatch",
        "--parsable",
        "--cpus-per-task=1",
        *flags,
        SCRIPT,
        "demo",
        out,
        *keys,
    ]
    return run(*command, cwd=folder).strip()


def play(folder: Path) -> None:
    """A run that finishes; one that is stopped, goes on, and is cancelled."""
    run("tessera", "datagen", "--rows", "4000", "--out", "clicks.tsv", "--seed", "7", cwd=folder)

    def log(job: str) -> str:
        path = folder / f"tessera-train-{job}.log"
        return path.read_text() if path.exists() else ""

    def steps(word: str) -> list[str]:
        return re.findall(rf"{word} after step (\d+)", log(long))

    small = submit(folder, "small")
    wait_for("a small run is finished", lambda: fact(small, "JobState") == "COMPLETED")
    again = submit(folder, "small")
    wait_for("a second job of it ends", lambda: fact(again, "JobState") == "COMPLETED")
    if "finished: best step" not in log(small) or log(again) != "small is finished\n":
        sys.exit(f"they said: {log(small)}{log(again)}")

    # The signal comes two minutes before the limit, which Slurm looks at about once in a minute.
    long = submit(folder, "long", "--time=3", epochs=1_000_000)
    wait_for(
        "the limit is near, and the ranks of another have saved", lambda: bool(steps("stopped"))
    )
    wait_for("it is queued again", lambda: fact(long, "JobState") == "PENDING")
    if "the time limit is near" not in log(long) or fact(long, "Restarts") != "1":
        sys.exit(f"it said: {log(long)}")
    run("scontrol", "update", f"jobid={long}", "StartTime=now", "TimeLimit=30")
    wait_for("it goes on", lambda: bool(steps("resumed")))
    if steps("stopped") != steps("resumed"):
        sys.exit(f"it stopped after {steps('stopped')} and went on after {steps('resumed')}")
    run("scancel", long)
    wait_for("it is cancelled, and saves first", lambda: len(steps("stopped")) > 1)
    wait_for("its job ends", lambda: fact(long, "JobState") == "CANCELLED")


def main() -> int:
    """Command line: see the module's docstring."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    lacking = [
        name
        for name in ("slurmctld", "slurmd", "sbatch", "tessera", "torchrun")
        if shutil.which(name) is None
    ]
    if lacking:
        sys.exit(f"not on the path: {', '.join(lacking)} (Debian: apt-get install slurm-wlm)")
    with tempfile.TemporaryDirectory(prefix="tessera-slurm-") as name:
        for daemon in ("state", *(f"spool-{node}" for node in NODES)):
            (Path(name) / daemon).mkdir()
        with cluster(Path(name)):
            play(Path(name))
    print(
        "jobs on two nodes finish, save near their limit and when they are cancelled, and go on where they stopped"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
