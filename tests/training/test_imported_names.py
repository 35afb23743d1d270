"""The script that counts which of TorchRec's names code bases import, on folders of our own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tessera.training.bench import imported_names

PROGRAM = """
import torchrec
import torchrec.modules.mlp as mlp
import torchrec.nowhere
from torchrec.modules.mlp import MLP as Layers, _private
from torchrec.modules.tests.tools import two
from torch import nn

torchrec.EmbeddingBagCollection
mlp.Perceptron.forward
torchrec.modules.mlp.Unknown
nn.Linear
"""


def test_paths_are_those_of_imports_and_of_attributes() -> None:
    found = imported_names.imported_paths(PROGRAM)
    assert {path for path in found if "EmbeddingBag" in path or "Perceptron" in path} == {
        "torchrec.EmbeddingBagCollection",
        "torchrec.modules.mlp.Perceptron",
        "torchrec.modules.mlp.Perceptron.forward",
    }
    assert {"torchrec.modules.mlp.MLP", "torchrec.modules.tests.tools.two"} <= found
    assert not any(path.startswith("torch.") for path in found)


def test_names_that_torchrec_has_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "checkout" / "torchrec"
    (library / "modules").mkdir(parents=True)
    (library / "__init__.py").write_text(
        "from torchrec.modules.ebc import EmbeddingBagCollection\n"
    )
    (library / "modules" / "__init__.py").write_text("")
    (library / "modules" / "mlp.py").write_text(
        "try:\n    class MLP: ...\nexcept ImportError:\n    pass\n"
        "class Perceptron: ...\nclass _private: ...\nABSENT: int = 3\n"
    )
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (first / "a.py").write_text(PROGRAM)
    (first / "b.py").write_text("from torchrec.modules.mlp import ABSENT, MLP\n")
    (first / "broken.py").write_text("import torchrec (")
    cell = {"cell_type": "code", "source": ["!pip install torchrec\n", "import torchrec\n"]}
    used = {"cell_type": "code", "source": ["torchrec.EmbeddingBagCollection()"]}
    (second / "c.ipynb").write_text(json.dumps({"cells": [cell, used]}))
    arguments = ["--torchrec", str(library.parent), "--code", str(first), "--code", str(second)]
    monkeypatch.setattr(sys, "argv", ["imported_names.py", *arguments])
    assert imported_names.main() == 0
    printed = capsys.readouterr().out.splitlines()
    assert "| first | 4 | 3 |" in printed
    assert "| second | 1 | 1 |" in printed
    assert "3 of 4 names (75.0%)" in printed
    assert "4 of 5 names, each once for a code base (80.0%)" in printed
    assert "5 of 6 names, each once for a file (83.3%)" in printed
    assert printed[-1] == "not here: torchrec.modules.mlp.ABSENT (first 1)"
    with pytest.raises(ValueError, match="has no folder torchrec"):
        imported_names.Library(tmp_path)
