"""docs/tuning.md: its blocks, run in their order in one folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tessera.cli import main
from tests import REPOSITORY
from tests.tuning import in_process

pytest.importorskip("optuna")

PAGE = REPOSITORY / "docs" / "tuning.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FEWER = {"30": "2", "60": "3"}
"""Trials that the page's searches have, and those that are enough here."""


def test_every_block_of_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    in_process.use(monkeypatch)
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert [kind for kind, _ in blocks] == ["bash", "yaml", "bash", "bash"]
    for kind, text in blocks:
        if kind == "yaml":
            Path(text.splitlines()[0].removeprefix("# ")).write_text(text, encoding="utf-8")
            continue
        for line in text.splitlines():
            words = shlex.split(line)
            assert words.pop(0) == "tessera"
            words = [FEWER.get(word, word) for word in words]
            quiet = ["--quiet"] if words[0] in {"train", "tune"} else []
            status = main(words + quiet)
            assert status == 0, capsys.readouterr().err
    assert Path("runs/wider/best.yaml").exists()
    assert (tmp_path / "runs.html").read_text().count("<svg ") == 3
    assert len((tmp_path / "runs" / "wider" / "trials.csv").read_text().splitlines()) == 4
    assert "not comparable" not in capsys.readouterr().out
