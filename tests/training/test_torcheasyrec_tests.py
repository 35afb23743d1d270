"""The script that runs TorchEasyRec's tests on Tessera, on a small package of our own and on a given checkout.

The environment variable ``TESSERA_TORCHEASYREC_CHECKOUT`` names a checkout, whose requirements must be
importable.
"""

import os
import sys
from pathlib import Path

import pytest

from tessera.training.bench import torcheasyrec_tests
from tessera.training.bench.program_rewrite import HOME
from tessera.training.bench.torcheasyrec_tests import (
    copy_package,
    names_not_here,
    report,
    results_of,
    run,
    test_files,
)

test_files.__test__ = False
CHECKOUT = os.environ.get("TESSERA_TORCHEASYREC_CHECKOUT", "")
SOURCE = """
import unittest

import pyfg
from torchrec.modules.mlp import MLP
from torchrec.modules.nowhere import Thing


class Tests(unittest.TestCase):
    def test_here(self):
        self.assertEqual(MLP.__module__, "tessera.training.modules.mlp")

    def test_closed(self):
        pyfg.Handler()

    def test_uses_what_is_not_here(self):
        Thing(3)

    @unittest.skip("no GPU")
    def test_skipped(self):
        pass
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout" / "tzrec" / "modules"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "own_test.py").write_text(SOURCE)
    (folder / "broken_test.py").write_text("import nothing_of_this_name\n")
    return tmp_path / "checkout"


def test_files_run_and_a_missing_name_fails_its_test_alone(checkout, tmp_path):
    files = test_files(checkout, "")
    assert files == ["tzrec/modules/broken_test.py", "tzrec/modules/own_test.py"]
    assert test_files(checkout, "models/") == []
    assert names_not_here(checkout / "tzrec") == ["torchrec.modules.nowhere.Thing"]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    copy_package(checkout, scratch, HOME)
    results = run(files, scratch, limit_s=300)
    outcomes = {test.rpartition(".")[2]: found for test, found in results.items()}
    assert outcomes["test_here"] == ("passed", "")
    assert outcomes["test_skipped"] == ("skipped", "no GPU")
    assert outcomes["test_closed"][0] == "failed"
    assert outcomes["test_closed"][1].endswith("pyfg.Handler is not here")
    assert outcomes["test_uses_what_is_not_here"][1].endswith("nowhere.Thing is not here")
    assert outcomes["broken_test"][0] == "failed"
    assert "nothing_of_this_name" in outcomes["broken_test"][1]
    # The checkout stays as it was.
    assert (checkout / "tzrec" / "modules" / "own_test.py").read_text() == SOURCE


OURS = """<testsuites><testsuite>
<testcase classname="tzrec.modules.a_test.Tests" name="test_one"/>
<testcase classname="tzrec.modules.a_test.Tests" name="test_two"><failure message="Other: text">E  Other: text
</failure></testcase>
<testcase classname="tzrec.models.b_test.Tests" name="test_three"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("theirs", "good"),
    [
        (None, False),  # one fails, and nothing says that it has to
        ({}, True),
        ({"tzrec.modules.a_test.Tests.test_two": ("failed", "of its own")}, True),
        ({"tzrec.modules.a_test.Tests.test_two": ("passed", "")}, False),
        ({"tzrec.models.b_test.Tests.test_three": ("passed", "")}, False),
        ({"tzrec.modules.a_test.Tests.test_gone": ("passed", "")}, False),
    ],
)
def test_what_passes_with_torchrec_has_to_pass_here(theirs, good, capsys):
    ours = results_of(OURS)
    assert ours["tzrec.modules.a_test.Tests.test_two"] == ("failed", "Other: text")
    assert report(ours, theirs) is good
    printed = capsys.readouterr().out
    count = "" if theirs is None else sum(o == "passed" for o, _ in theirs.values())
    assert f"| `together` | {count} | 1 | 1 |" in printed


def test_a_folder_without_tests_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torcheasyrec_tests.py", "--checkout", str(tmp_path)])
    with pytest.raises(SystemExit):
        torcheasyrec_tests.main()
    assert "--checkout: no file of tests fits" in capsys.readouterr().err


@pytest.mark.skipif(not CHECKOUT, reason="TESSERA_TORCHEASYREC_CHECKOUT names no checkout")
def test_small_modules_of_a_checkout_pass(tmp_path):
    copy_package(Path(CHECKOUT), tmp_path, HOME)
    results = run(test_files(Path(CHECKOUT), "modules/(fm|mlp|embedding)_test"), tmp_path, 600)
    assert results
    assert {test for test, (outcome, _) in results.items() if outcome == "failed"} == set()
