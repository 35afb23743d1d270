"""The script that runs TorchRec's unit tests on Tessera, on a small checkout of our own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tessera.training.bench import torchrec_tests
from tessera.training.bench.missing_names import Missing, MissingName, guarded, taken
from tessera.training.bench.program_rewrite import HOME
from tessera.training.bench.torchrec_tests import Limits, copy_tests, passed, run, test_files
from tessera.training.bench.unit_test_names import tests_of_private_names

test_files.__test__ = False
tests_of_private_names.__test__ = False
SOURCE = """
import unittest

import torchrec
from torchrec.modules.mlp import MLP
from torchrec.modules.nowhere import Thing
from torchrec.modules.tests.own_tools import two
from torchrec.modules.embedding_modules import _private, EmbeddingBagCollection


class Tests(unittest.TestCase):
    def helper(self):
        return _private

    def test_here(self):
        self.assertEqual(list(MLP(3, [two()]).state_dict())[0], "_mlp.0._linear.weight")
        self.assertTrue(issubclass(torchrec.EmbeddingBagCollection, EmbeddingBagCollection))

    def test_uses_what_is_not_here(self):
        Thing(3)

    def test_of_a_private_name(self):
        self.helper().call()

    def test_of_an_attribute(self):
        MLP(3, [2])._mlp.forward
        self._own = 3

    def test_of_a_path(self):
        "torchrec.modules._mlp.MLP"


def test_alone():
    assert super(MLP)._x
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout" / "torchrec" / "modules" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_own.py").write_text(SOURCE)
    (folder / "own_tools.py").write_text("def two():\n    return 2\n")
    return tmp_path / "checkout"


def test_tests_of_private_names_are_told_from_others():
    assert tests_of_private_names(SOURCE) == {
        "Tests.test_of_a_private_name",
        "Tests.test_of_an_attribute",
        "Tests.test_of_a_path",
    }


def test_a_file_runs_and_a_missing_name_fails_its_test_alone(checkout, tmp_path):
    (file,) = test_files(checkout, "modules")
    assert test_files(checkout, "sparse") == []
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    copy_tests(checkout, scratch, HOME)
    results = run(file, scratch, Limits(300, 60))
    assert "Tests.test_here" in passed(results), results
    outcome, said = results["Tests.test_uses_what_is_not_here"]
    assert outcome == "failed"
    assert said.endswith("tessera.training.modules.nowhere.Thing is not here")


def test_the_report_counts_what_passes_with_torchrec(checkout, tmp_path, capsys, monkeypatch):
    record = tmp_path / "record.json"
    names = '["Tests.test_here", "Tests.test_uses_what_is_not_here", "Tests.test_of_an_attribute"]'
    record.write_text(f'{{"modules/tests/test_own.py": {names}}}')
    arguments = ["--checkout", str(checkout), "--record", str(record), "--why"]
    monkeypatch.setattr(sys, "argv", ["torchrec_tests.py", *arguments])
    assert torchrec_tests.main() == 0
    printed = capsys.readouterr().out
    assert "| modules/tests/test_own.py | 2 | 1 | 1 | 1 |" in printed
    assert "Thing is not here" in printed
    assert "1 of 2 tests of public names pass here (50%)" in printed


def test_what_stands_for_a_missing_name():
    assert taken("tessera.training.modules", "mlp").MLP is not None
    missing = taken("tessera.training.modules.mlp", "Nothing")
    assert isinstance(missing, Missing)
    made = type("Made", missing.__mro_entries__(()), {})
    for use in (missing, missing.inner, made, lambda: missing == 3, lambda: list(missing)):
        with pytest.raises(MissingName, match=r"modules\.mlp\.Nothing is not here"):
            use()
    assert (missing | None) is missing
    source = (
        "x = 1\nfrom tessera.training.a import (\n    B as C,\n    D,\n)\nfrom os import path\n"
    )
    assert guarded(source, "home").splitlines() == [
        "x = 1",
        "from home import taken",
        'C = taken("tessera.training.a", "B")',
        'D = taken("tessera.training.a", "D")',
        "from os import path",
    ]


def test_a_folder_without_tests_is_told(tmp_path):
    script = Path(torchrec_tests.__file__)
    found = subprocess.run(
        [sys.executable, script, "--checkout", tmp_path],
        check=False,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 2
    assert "--checkout: no file of tests fits" in found.stderr
