"""A program of `forked_program` is one that ``subprocess`` might have started."""

import contextlib
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import forked_program
from tests.patience import PATIENCE_S

SERVE = ["serve", "--host", "127.0.0.1", "--port", "0", "--http-port", "0"]


@pytest.fixture
def server(tmp_path):
    """A server of an empty repository that has told that it is ready."""
    models = tmp_path / "models"
    models.mkdir()
    flags = ["--model-repository", models, "--drain-propagation-ms", "0"]
    with forked_program.start([*SERVE, *flags], stderr=subprocess.PIPE) as process:
        try:
            assert any('"event": "ready"' in line for line in process.stderr)
            assert isinstance(process, forked_program.ForkedProgram)
            yield process
        finally:
            process.kill()


def test_what_it_prints_and_how_it_ends():
    told = forked_program.run(["--version"])
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.startswith("tessera ")
    told = forked_program.run([*SERVE, "--nonsense"])
    assert (told.returncode, told.stdout) == (2, "")
    assert "--nonsense" in told.stderr


def test_it_is_told_by_signals(server):
    assert server.poll() is None
    assert Path(f"/proc/{server.pid}/stat").exists()
    with pytest.raises(subprocess.TimeoutExpired):
        server.wait(0.01)
    server.terminate()
    assert server.wait(PATIENCE_S) == server.poll() == 0
    server.kill()  # nobody is there to hear of it


def test_a_signal_that_kills_is_its_status(server):
    server.kill()
    assert server.wait(PATIENCE_S) == -signal.SIGKILL


def test_it_has_the_folder_and_the_files_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "said").open("w") as said:
        arguments = ["verify", "none.pt"]
        with forked_program.start(arguments, stdout=said, stderr=subprocess.STDOUT) as process:
            assert process.wait(PATIENCE_S) == 2
    assert "none.pt" in (tmp_path / "said").read_text()
    (tmp_path / "a").mkdir()
    flags = ["--model-repository", "a", "--config", "b.yaml"]
    assert "b.yaml" in forked_program.run([*SERVE, *flags]).stderr


def test_code_runs_in_the_place_of_tessera():
    code = "import sys, torch\nprint(__name__, sys.argv, torch.get_num_threads())"
    told = forked_program.run(["one", 2], code=code)
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout == "__main__ ['-c', 'one', '2'] 1\n"
    # Threads are waited for and what is to be done at the end is done, and what C has not written yet is written.
    code = "import atexit, ctypes, sys, threading, time\natexit.register(print, 'end')\n"
    code += "ctypes.CDLL(None).puts(b'C')\n"
    code += "threading.Thread(target=lambda: print(time.sleep(0.1))).start()\nsys.exit(7)"
    told = forked_program.run([], code=code)
    assert (told.returncode, told.stderr) == (7, "")
    assert sorted(told.stdout.split()) == ["C", "None", "end"]
    told = forked_program.run([], code="x = {}\nx['none']")
    assert told.returncode == 1
    assert told.stderr.endswith("KeyError: 'none'\n")


def test_another_environment_is_that_of_a_process_of_its_own(monkeypatch):
    forked_program.run(["--version"])
    monkeypatch.setenv("TESSERA_WORKERS", "several")
    kinds, flags = [], [*SERVE, "--model", "none.pt"]
    for _ in range(2):
        with forked_program.start(flags, stderr=subprocess.PIPE) as process:
            kinds.append(isinstance(process, forked_program.ForkedProgram))
            said = process.stderr.read()
        assert "TESSERA_WORKERS" in said
    assert kinds == [False, True]


def test_it_ends_with_the_process_that_it_was_forked_from(server):
    (source,) = (each for each in forked_program._sources.values() if server in each._programs)
    source.stop()
    assert server.wait(PATIENCE_S) == -signal.SIGKILL
    until = time.monotonic() + PATIENCE_S
    while runs(server.pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not runs(server.pid)
    assert forked_program.run(["--version"]).returncode == 0  # of another one


def runs(pid):
    """Whether the process is there and has not ended."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
