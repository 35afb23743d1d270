"""The example of docs/extending.md, 'A transform': one file more, then train and package."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest
import torch

from tessera.cli import main
from tessera.errors import UserError
from tessera.serving.package.loading import load_package
from tessera.training.trained import load_trained
from tessera.training.transforms import kinds, transform
from tests.transforms.table_runs import write_run

ROOT = Path(__file__).resolve().parents[2]
NAME = "tessera.training.transforms.kinds.periodic"


@pytest.fixture
def periodic(tmp_path, monkeypatch):
    """The example's file in a folder of its own, found as if it lay beside the others."""
    page = (ROOT / "docs/extending.md").read_text()
    section = page.partition("\n## A transform\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert "training/transforms/kinds/periodic.py" in section
    more = tmp_path / "more"
    more.mkdir()
    (more / "periodic.py").write_text(code)
    known = dict(transform.transforms_by_name("dense") | transform.transforms_by_name("ids"))
    monkeypatch.setattr(transform, "_TRANSFORMS", known)
    monkeypatch.setattr(kinds, "__path__", [*kinds.__path__, str(more)])
    yield
    sys.modules.pop(NAME, None)


def test_the_example_trains_and_is_packaged(periodic, tmp_path, capsys):
    config = write_run(tmp_path, age="{kind: dense, transform: [{periodic: 24}]}")
    run, package = tmp_path / "run", tmp_path / "model.pt"
    assert main(["train", "--config", str(config), "--out", str(run), "--quiet"]) == 0
    model = load_trained(run).model
    given = torch.tensor([[0.0, 0.0], [0.0, 6.0], [0.0, 12.0], [0.0, math.nan]])
    values = given
    for stage in model.preprocessor.stages:
        values = stage(values, given)
    assert values[:3, 1].tolist() == pytest.approx([1, 0, -1], abs=1e-6)
    assert torch.isnan(values[3, 1])
    assert main(["package-model", str(run), "--out", str(package), "--dtype", "fp32"]) == 0
    assert load_package(package).manifest.evaluation.max_abs_score_error < 1e-5
    capsys.readouterr()
    with pytest.raises(UserError, match=r"period=0\.0: give a finite number above 0"):
        transform.parse_chain("columns.x.transform", "dense", [{"periodic": 0}])


def test_the_example_leaves_nothing_behind():
    assert "periodic" not in transform.transforms_by_name("dense")
