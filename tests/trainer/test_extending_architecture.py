"""The example of docs/extending.md, 'An architecture': one file more, then train and package."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tessera.cli import main
from tessera.serving.package.loading import load_package
from tessera.training.models import architectures
from tessera.training.models.config import ModelConfig
from tessera.training.trained import load_trained

ROOT = Path(__file__).resolve().parents[2]
NAME = "tessera.training.models.architectures.wide_mlp"


@pytest.fixture
def wide_mlp(tmp_path, monkeypatch):
    """The example's file in a folder of its own, found as if it lay beside the others."""
    page = (ROOT / "docs/extending.md").read_text()
    section = page.partition("\n## An architecture\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert "training/models/architectures/wide_mlp.py" in section
    more = tmp_path / "more"
    more.mkdir()
    (more / "wide_mlp.py").write_text(code)
    variants = ModelConfig.variants
    monkeypatch.setattr(variants, "_classes", dict(variants.classes()))
    monkeypatch.setattr(variants, "_imported", False)
    monkeypatch.setattr(architectures, "__path__", [*architectures.__path__, str(more)])
    yield
    sys.modules.pop(NAME, None)


def test_the_example_trains_and_is_packaged(wide_mlp, tiny_yaml, tmp_path, capsys):
    config = tmp_path / "wide.yaml"
    text = tiny_yaml.read_text()
    config.write_text(re.sub(r"  (dense|over)_layers: .*\n|  dropout: .*\n", "", text))
    run, package = tmp_path / "run", tmp_path / "model.pt"
    overrides = ["model.arch=wide_mlp", "model.layers=[8]"]
    assert main(["train", "--config", str(config), *overrides, "--out", str(run), "--quiet"]) == 0
    trained = load_trained(run)
    assert type(trained.model.arch).__module__ == NAME
    assert trained.model.logit_layers() == {"arch.logit": (0,)}
    arguments = [str(run), "--out", str(package), "--dtype", "fp32"]
    assert main(["package-model", *arguments]) == 0
    assert load_package(package).manifest.schema.outputs[0].width == 1
    capsys.readouterr()


def test_the_example_leaves_nothing_behind():
    assert "wide_mlp" not in ModelConfig.variants.classes()
