"""The wheel holds what the checkout holds, and its program starts."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tessera
from tessera.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("training", "serving", "kernels")
SHIPPED_SUFFIXES = {".py", ".pyi", ".yaml", ".html"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the tracked files, so that no local build folder leaks in."""
    source = tmp_path_factory.mktemp("source")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in listing.stdout.split("\0") if name and (ROOT / name).exists()]
    subprocess.run(["tar", "-cf", str(source / "source.tar"), *names], cwd=ROOT, check=True)
    subprocess.run(["tar", "-xf", "source.tar"], cwd=source, check=True)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return next(out.glob("*.whl")), names


def test_wheel_holds_every_source_file(wheel):
    path, names = wheel
    packed = set(zipfile.ZipFile(path).namelist())
    expected = {
        f"tessera/{name}"
        for name in names
        if name.split("/")[0] in FOLDERS
        and Path(name).suffix in SHIPPED_SUFFIXES
        and (ROOT / name).parent.joinpath("__init__.py").exists()
    }
    assert expected
    assert expected - packed == set()


def test_program_of_the_wheel_starts_elsewhere(wheel, tmp_path):
    path, _ = wheel
    site = tmp_path / "site"
    zipfile.ZipFile(path).extractall(site)
    probe = "import tessera, sys; print(tessera.__file__); from tessera.cli import main; main(['--version'])"
    result = subprocess.run(
        [sys.executable, "-c", probe],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        str(site / "tessera" / "__init__.py"),
        f"tessera {tessera.__version__}",
    ]


@pytest.mark.parametrize("arguments", [["nonsense"], ["train", "--nonsense"], []])
def test_a_wrong_command_line_exits_with_2(arguments):
    result = subprocess.run(
        [sys.executable, "-m", "tessera", *arguments], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "error:" in result.stderr


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_needs_no_torch(command):
    probe = (
        "import sys\n"
        "from tessera.cli import main\n"
        "try:\n"
        f"    main([{command!r}, '--help'])\n"
        "except SystemExit as stop:\n"
        "    assert stop.code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "usage:" in result.stdout
