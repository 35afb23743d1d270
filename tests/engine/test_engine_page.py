"""docs/engine.md: its programs run, in Python and in C, and name every option."""

import re
import shutil
import subprocess
import sys
from dataclasses import fields

import pytest

from tessera.errors import UserError
from tessera.serving.engine import EngineOptions, engine_library
from tests import REPOSITORY
from tests.package_factory import package_file
from tests.patience import PATIENCE_S

PAGE = (REPOSITORY / "docs" / "engine.md").read_text()

try:
    engine_library()
except UserError as missing:
    pytest.skip(str(missing), allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("page")
    package_file(made).rename(made / "model.pt")
    return made


def run(command, folder):
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def code(language):
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


def test_the_program_in_python(folder):
    printed = run([sys.executable, "-c", code("python")], folder)
    assert re.fullmatch(r"\[[\d. e-]+\]\n\(64,\)\n", printed)


def test_the_program_in_c(folder):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (folder / "scores.c").write_text(code("c"))
    library = engine_library()
    run(
        [
            *(compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "-o", "scores", "scores.c"),
            f"-I{REPOSITORY}/cpp_server/src/engine",
            *(str(library), f"-Wl,-rpath,{library.parent}", "-Wl,--allow-shlib-undefined"),
        ],
        folder,
    )
    printed = run([str(folder / "scores"), "model.pt"], folder)
    assert re.fullmatch(r"default: 0\.\d+ 0\.\d+\n", printed)


def test_the_page_has_every_option():
    cells = re.findall(r"^\| (`[a-z_`, ]+) \|", PAGE, re.MULTILINE)
    named = re.findall(r"`([a-z_]+)`", " ".join(cells))
    assert sorted(named) == sorted({field.name for field in fields(EngineOptions)})
