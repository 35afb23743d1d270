"""Installs what wheels/build.py has built into fresh environments outside the checkout, and uses it.

    python wheels/try_wheels.py --wheels dist

One environment has tessera-rec[cpu] and tessera-rec-server, the other tessera-rec-client alone.  In the first a
model is trained on generated data, packaged and verified, and both servers answer for it; `tessera predict` and the
client of the second environment ask each of them, and all answers must be the same.  Every program starts with no
PATH and no LD_LIBRARY_PATH.  Last, a wheel is made of tessera-rec's source archive and must hold the operators.

It needs Python and nothing else, but for the source archive, which wants a C++ compiler: --no-source leaves that out.
bare.Containerfile runs it so where Debian has Python alone.

pip takes other packages from wherever it is set up to: PIP_EXTRA_INDEX_URL can name the index with torch's CPU
build.  Takes some minutes and about 2 GB (with the torch that brings CUDA, 6).  Exit status: 0 all of it works, within
--limit-s; 1 what does not is on the terminal.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROWS = 20_000
_READY_S = 300
_BEGAN_S = time.monotonic()
# Asks for 16 samples' scores, in an environment that has neither torch nor the rest of tessera.
_ASK = """
import importlib.util, sys
from tessera.serving.client import Draw, PredictorClient, RequestDrawer, read_schema
assert importlib.util.find_spec("torch") is None and importlib.util.find_spec("tessera.cli") is None
schema = read_schema(sys.argv[2])
samples = RequestDrawer(schema, Draw(), seed=0).samples(16)
with PredictorClient(sys.argv[1], schema=schema, timeout_s=60) as client:
    print(client.predict_arrays(samples).outputs["default"].tolist())
"""


def main() -> int:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, default=Path("dist"), help="(default: dist)")
    parser.add_argument(
        "--no-source", action="store_true", help="make no wheel of the source archive"
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        metavar="S",
        help="fail where all of it takes longer than S seconds (default: no limit)",
    )
    args = parser.parse_args()
    wheels = args.wheels.resolve()
    with tempfile.TemporaryDirectory(prefix="tessera-try-") as name:
        folder = Path(name)
        # Both at once: pip mostly waits for what it downloads.
        with ThreadPoolExecutor() as threads:
            installed = threads.submit(environment, folder / "client", wheels, "tessera-rec-client")
            full = environment(folder / "full", wheels, "tessera-rec[cpu]", "tessera-rec-server")
            client = installed.result()
        model = train_and_package(full, folder)
        answers: dict[tuple[str, str], object] = {}
        for server in (["tessera", "serve"], ["tessera-server"]):
            with serving(full, server, model, folder) as address:
                answers[" ".join(server), "predict"] = predict(full, address, model, folder)
                answers[" ".join(server), "client"] = ask(client, address, model)
        for kind in ("predict", "client"):
            if answers["tessera serve", kind] != answers["tessera-server", kind]:
                sys.exit(f"try_wheels: the two servers' answers differ ({kind}): {answers}")
        if not args.no_source:
            from_source(full, wheels, folder)
        took_s = time.monotonic() - _BEGAN_S
    used = os.times()
    cpu_s = used.user + used.system + used.children_user + used.children_system
    print(f"all of it works ({took_s:.0f} s; {cpu_s:.0f} s of CPU time)")
    if args.limit_s is not None and took_s > args.limit_s:
        sys.exit(f"try_wheels: it took {took_s:.0f} s; the limit is {args.limit_s:g} s")
    return 0


def say(text: str) -> None:
    """Tell what comes next, and when."""
    print(f"== {time.monotonic() - _BEGAN_S:5.1f} s  {text}", flush=True)


def environment(folder: Path, wheels: Path, *names: str) -> Path:
    """A fresh virtual environment with distributions of this checkout; the folder of its programs."""
    venv.create(folder, with_pip=True)
    install(folder / "bin", wheels, *names)
    return folder / "bin"


def install(programs: Path, wheels: Path, *names: str) -> None:
    """Install distributions of this checkout from ``wheels`` and the rest from pip's indexes."""
    say(f"pip install {' '.join(names)}")
    files = []
    for name in names:
        bare_name, bracket, extras = name.partition("[")
        (wheel,) = wheels.glob(f"{bare_name.replace('-', '_')}-[0-9]*.whl")
        files.append(f"{wheel}{bracket}{extras}")
    pip = [str(programs / "python"), "-m", "pip", "install", "-q", "--find-links", str(wheels)]
    subprocess.run([*pip, *files], check=True)


def run(programs: Path, *command: str, cwd: Path) -> str:
    """Run a program of an environment as in a bare shell; its standard output."""
    say(" ".join(command).splitlines()[0])
    done = subprocess.run(
        [str(programs / command[0]), *command[1:]],
        cwd=cwd,
        env=bare(cwd),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\ntry_wheels: {' '.join(command)} ended with {done.returncode}")
    return done.stdout


def bare(home: Path) -> dict[str, str]:
    """An environment without PATH, LD_LIBRARY_PATH and PYTHONPATH."""
    return {"HOME": str(home), "LANG": "C.UTF-8"}


def train_and_package(programs: Path, folder: Path) -> Path:
    """The whole way to a package; its file."""
    site = run(
        programs, "python", "-c", "import tessera.training as t; print(t.__path__[0])", cwd=folder
    )
    config = Path(site.strip()) / "configs" / "demo.yaml"
    rows = folder / "clicks.tsv"
    run(
        programs,
        "tessera",
        "datagen",
        "--rows",
        str(ROWS),
        "--out",
        str(rows),
        "--seed",
        "7",
        cwd=folder,
    )
    settings = [f"data.path={rows}", "train.epochs=1"]
    run(
        programs, "tessera", "train", "--config", str(config), *settings, "--out", "run", cwd=folder
    )
    run(programs, "package-model", "run", "--out", "model.pt", cwd=folder)
    run(programs, "tessera", "verify", "model.pt", cwd=folder)
    return folder / "model.pt"


@contextmanager
def serving(programs: Path, server: list[str], model: Path, folder: Path) -> Iterator[str]:
    """A server of ``model`` on free ports; its gRPC address."""
    flags = [
        "--model",
        str(model),
        "--port",
        "0",
        "--http-port",
        "0",
        "--drain-propagation-ms",
        "0",
    ]
    say(" ".join([*server, *flags]))
    process = subprocess.Popen(
        [str(programs / server[0]), *server[1:], *flags],
        cwd=folder,
        env=bare(folder),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if line.startswith("{") and json.loads(line)["event"] == "ready":
                yield f"127.0.0.1:{json.loads(line)['port']}"
                break
        else:
            sys.exit(f"{''.join(said)}\ntry_wheels: {' '.join(server)} was never ready")
    finally:
        process.terminate()
        process.stderr.close()
        process.wait(_READY_S)
    if process.returncode:
        sys.exit(f"try_wheels: {' '.join(server)} ended with {process.returncode}")


def predict(programs: Path, address: str, model: Path, folder: Path) -> list[str]:
    """What `tessera predict` prints of 100 random samples, the same ones each time."""
    command = ["tessera", "predict", "--address", address, "--model-file", str(model)]
    return run(programs, *command, "--random", "100", cwd=folder).splitlines()


def ask(programs: Path, address: str, model: Path) -> str:
    """What the client alone is answered, in an environment that has no torch."""
    return run(programs, "python", "-c", _ASK, address, str(model), cwd=model.parent)


def from_source(programs: Path, wheels: Path, folder: Path) -> None:
    """Make a wheel of tessera-rec's source archive, with the torch of the environment."""
    say("a wheel of the source archive")
    archive = next(wheels.glob("tessera_rec-[0-9]*.tar.gz"))
    pip = [str(programs / "python"), "-m", "pip"]
    subprocess.run([*pip, "install", "-q", "setuptools>=77", "cmake>=3.25,<5"], check=True)
    # The compiler is the system's.
    path = f"{programs}:{os.environ.get('PATH', '')}"
    command = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "made", str(archive)]
    subprocess.run(command, check=True, cwd=folder, env={**os.environ, "PATH": path})
    made = next((folder / "made").glob("*.whl"))
    if "tessera/kernels/lib/libtessera_ops.so" not in zipfile.ZipFile(made).namelist():
        sys.exit(f"try_wheels: {made.name} of the source archive holds no operators")
    shutil.rmtree(folder / "made")


if __name__ == "__main__":
    raise SystemExit(main())
