"""docs/your-data.md: its blocks, run in their order in one folder."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tessera.cli import main
from tests import REPOSITORY
from tests.data import clicks

PAGE = REPOSITORY / "docs" / "your-data.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A line of a bash block, by the program's own parts."""
    command, _, comment = line.partition("#")
    words = shlex.split(command)
    if words[0] == "echo":
        assert words[2] == ">"
        Path(words[3]).write_text(words[1] + "\n")
        return
    assert words[0] == "tessera"
    quiet = ["--quiet", "run.report=false"] if words[1] == "train" else []
    status = main(words[1:] + quiet)
    error = capsys.readouterr().err
    expected = re.search(r"exit status (\d)", comment)
    assert status == (int(expected[1]) if expected else 0), error
    if status == 2:
        assert error.count("\n") == 1


def test_every_block_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    clicks.write_csv(tmp_path / "clicks.csv", clicks.rows(3000))
    page = PAGE.read_text(encoding="utf-8")
    before, _, transforms = page.partition("\n## Transforms")  # which tests/transforms checks
    blocks = BLOCK.findall(before + transforms.partition("\n## ")[2])
    assert [kind for kind, _ in blocks] == ["bash", "yaml", "bash", "bash", "bash", "bash"]
    for kind, text in blocks:
        if kind == "yaml":
            name = text.splitlines()[0].removeprefix("# ")
            Path(name).write_text(text, encoding="utf-8")
            continue
        for line in text.splitlines():
            run_line(line, capsys)
    for run in ("first", "second", "by-user"):
        final = json.loads((tmp_path / "runs" / run / "final.json").read_text())
        assert final["malformed_rows"] == 0
    assert not (tmp_path / "runs" / "wrong" / "final.json").exists()
    scores = pq.read_table("scores.parquet")
    assert scores.column_names == ["user_id", "clicked", "default"]
    assert scores.num_rows == 3000
    assert scores.column("default").null_count == 0
