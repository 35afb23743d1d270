from __future__ import annotations

import pytest

from tessera.training.config import ExperimentConfig, load_config
from tests.trainer.tiny_runs import TINY, write_criteo


@pytest.fixture(scope="session")
def clicks(tmp_path_factory):
    """A small file in Criteo's format; its cache is made once."""
    return write_criteo(tmp_path_factory.mktemp("clicks") / "clicks.tsv", rows=400)


@pytest.fixture(scope="session")
def tiny_yaml(clicks):
    """A config file that trains a few dozen steps on `clicks` in a second or two."""
    path = clicks.parent / "tiny.yaml"
    path.write_text(TINY.replace("PATH", str(clicks)))
    return path


@pytest.fixture
def tiny(tiny_yaml) -> ExperimentConfig:
    return load_config(tiny_yaml)
