"""How the program ends, whatever its commands do: by status, in one line, with nothing torn."""

import errno
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tessera import cli
from tessera.errors import UserError
from tessera.serving.package.replace import replacing

NAME = "inspect"


@pytest.fixture
def command(monkeypatch):
    """Puts a function in the place of a command's ``run``."""

    def use(run):
        module = types.SimpleNamespace(add_arguments=lambda parser: None, run=run, __doc__="")
        monkeypatch.setattr(cli, "_load", lambda name: module)

    return use


def raising(error):
    def run(args):
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError(errno.EROFS, "Read-only file system", "/a/b"), "/a/b: Read-only file system"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "/a/b"), "/a/b: Not a directory"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "xx"), "xx: File name too long"),
        (UserError("n is 0; give 1"), "n is 0; give 1"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_status_2(command, capsys, error, line):
    command(raising(error))
    assert cli.main([NAME]) == 2
    assert capsys.readouterr().err == f"tessera {NAME}: error: {line}\n"


@pytest.mark.parametrize("error", [OSError(errno.EBADF, "Bad file descriptor"), KeyError("x")])
def test_a_bug_keeps_its_traceback(command, error):
    command(raising(error))
    with pytest.raises(type(error)):
        cli.main([NAME])


def test_ctrl_c_while_the_command_is_still_imported(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_load", raising(KeyboardInterrupt()))
    assert cli.main([NAME]) == 130
    assert capsys.readouterr().err == f"tessera {NAME}: interrupted\n"


def test_sigterm_unwinds_and_is_then_as_it_was(command):
    cleaned = []

    def run(args):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            cleaned.append(True)

    before = signal.getsignal(signal.SIGTERM)
    command(run)
    with pytest.raises(SystemExit) as stop:
        cli.main([NAME])
    assert (stop.value.code, cleaned) == (143, [True])
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_wrong_flag_ends_with_2_and_one_line(capsys):
    for arguments, what in (
        (
            ["inspect", "m.pt", "--nosuch"],
            "tessera inspect: error: unrecognized arguments: --nosuch",
        ),
        (
            ["package-model", "RUN", "--out", "m.pt", "--shardz=2"],
            "tessera package-model: error: unrecognized arguments: --shardz=2; did you mean --shards?",
        ),
        (
            ["predict", "--adress", "127.0.0.1:1", "--random", "1"],
            "tessera predict: error: unrecognized arguments: --adress; did you mean --address?",
        ),
        (
            ["package-model", "RUN", "--repositroy=DIR"],
            "tessera package-model: error: unrecognized arguments: --repositroy=DIR; did you mean --repository?",
        ),
        (
            ["predict", "--rand", "1", "--nosuch"],
            "tessera predict: error: the following arguments are required: --address",
        ),
        (["nosuch"], "tessera: error: argument COMMAND: invalid choice: 'nosuch'"),
        (["sevre"], "tessera: error: argument COMMAND: invalid choice: 'sevre'"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(what)
        assert line.endswith(("--help", "mean serve?")) or "did you mean" in what


LONG_OUTPUT = """
import sys, types
from tessera import cli
run = lambda args: [print("x" * 100) for _ in range(100_000)] and 0
cli._load = lambda name: types.SimpleNamespace(add_arguments=lambda p: None, run=run, __doc__="")
sys.exit(cli.main(["inspect"]))
"""


def test_a_reader_that_has_seen_enough_is_no_error():
    with subprocess.Popen(
        [sys.executable, "-c", LONG_OUTPUT], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout.read(10) == b"x" * 10
        child.stdout.close()
        assert (child.stderr.read(), child.wait()) == (b"", 141)


TERMINATED = """
import os, signal, sys
from tessera import cli
# The signal comes when the file is whole but has not got its name yet.
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGTERM)
sys.exit(cli.main(["datagen", "--rows", "5", "--workers", "1", "--out", sys.argv[1]]))
"""


def test_a_terminated_writer_leaves_nothing(tmp_path):
    out = tmp_path / "rows.tsv"
    child = subprocess.run([sys.executable, "-c", TERMINATED, str(out)], check=False)
    assert child.returncode == 143
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [Path("/"), Path("/dev/null")])
def test_a_package_takes_the_place_of_files_only(path):
    # The superuser could otherwise turn a device into a file.
    with pytest.raises(UserError, match="exists and is not a file"), replacing(path):
        pytest.fail("the file was begun")
