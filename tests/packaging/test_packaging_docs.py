"""The example of docs/packaging.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tessera.cli import COMMANDS, main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "packaging.md"


def test_the_example_makes_a_package_that_verifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package, publish = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "example"}
    exec(compile(package, str(PAGE), "exec"), names)
    assert "['user', 'item']" in capsys.readouterr().out
    assert main(["verify", "attending.pt"]) == 0
    for number in (1, 2):
        exec(compile(publish, str(PAGE), "exec"), names)
        assert main(["verify", f"models/ranker/{number}/model.pt"]) == 0


def test_the_flags_that_the_page_names_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    named = set(re.findall(r"--[a-z][a-z-]+", PAGE.read_text()))
    assert "--factory" in named
    assert named <= known
