"""The table of all of TorchRec's public names in docs/torchrec.md, held without TorchRec."""

import importlib
import json
import re

import pytest

from tessera.training.bench import torchrec_names
from tessera.training.bench.torchrec_reasons import ELSEWHERE, REASONS

CONTENT = json.loads(torchrec_names.NAMES.read_text())
NAMES = CONTENT["names"]
EVERY = {f"{module}.{name}".lstrip(".") for module, names in NAMES.items() for name in names}


def test_the_table_says_what_the_code_has():
    assert torchrec_names.PAGE.read_text() == torchrec_names.page_with_table(), (
        f"run {torchrec_names.COMMAND} --write"
    )


def cells():
    section = torchrec_names.PAGE.read_text().partition(torchrec_names.HEADING)[2]
    for line in section.splitlines():
        if line.startswith("| `"):
            module, here, others = (cell.strip() for cell in line.strip("|").split(" | "))
            yield module.strip("`"), re.findall(r"`([\w.]+)`", here), others


def test_what_the_table_calls_here_can_be_imported_and_all_else_has_a_place_or_a_reason():
    found, said = 0, 0
    for module, here, others in cells():
        for name in here:
            ours = importlib.import_module(f"tessera.training.{module}")
            assert callable(getattr(ours, name))
            found += 1
        for part in filter(None, others.split("<br>")):
            names, _, reason = part.partition(": ")
            assert re.match(r"(elsewhere|left out): .{3,}", reason)
            said += len(names.split(", "))
    assert found > 300
    assert found + said == len(EVERY) > 1300


def test_every_place_and_reason_is_used():
    assert set(ELSEWHERE) <= EVERY
    for pattern, reason in REASONS:
        assert any(re.fullmatch(pattern, name) for name in EVERY), f"no name is {reason}"


def test_names_are_read_from_a_checkout(tmp_path):
    package = tmp_path / "torchrec"
    for file, source in {
        "__init__.py": "from torchrec.a import A\n",
        "a.py": "class A: pass\ndef _b(): pass\nasync def c(): pass\nD = 1\n",
        "deep/__init__.py": "def e(): pass\n",
        "deep/tests/test_a.py": "def f(): pass\n",
        "deep/test_utils/help.py": "def g(): pass\n",
        "deep/scripts/run.py": "def h(): pass\n",
    }.items():
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text(source)
    expected = {"a": ["A", "c"], "deep": ["e"]}
    assert torchrec_names.read_torchrec(tmp_path) == expected
    assert torchrec_names.read_torchrec(package) == expected


def test_a_name_without_a_place_and_a_reason_is_told(monkeypatch):
    names = {"streamable": ["Pipelineable", "Nonsense"], "elsewhere": ["RowWiseAdagrad"]}
    with pytest.raises(ValueError, match=r"streamable\.Nonsense is not here and has no reason"):
        torchrec_names.table(names, "1")
    text = torchrec_names.table({**names, "streamable": ["Pipelineable"]}, "1")
    assert "| `streamable` | `Pipelineable` |  |" in text
    assert "| `elsewhere` |  | `RowWiseAdagrad`: elsewhere: `optim.rowwise_adagrad` |" in text
    assert "TorchRec 1 has 2 public" in text
