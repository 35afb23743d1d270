from __future__ import annotations

from pathlib import Path

import pytest

from tessera.training.config import SHIPPED_CONFIGS, load_config
from tessera.training.data import criteo_format, movielens
from tessera.training.models.ranking import build_ranking_model

NAMES = {
    "criteo": (criteo_format.DENSE_NAMES, criteo_format.SPARSE_NAMES),
    "movielens": (movielens.DENSE_NAMES, movielens.SPARSE_NAMES),
}


@pytest.mark.parametrize("path", sorted(SHIPPED_CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_a_shipped_config_fits_the_features_of_its_format(path: Path) -> None:
    config = load_config(path)
    dense, sparse = NAMES[config.data.format]
    model = build_ranking_model(config.model, dense, sparse, device="meta")
    assert [feature.name for feature in model.features] == list(sparse)
