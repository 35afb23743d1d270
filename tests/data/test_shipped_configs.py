from __future__ import annotations

from pathlib import Path

import pytest

from tessera.training.config import SHIPPED_CONFIGS, load_config
from tessera.training.data import criteo_format, movielens
from tessera.training.models.ranking import build_ranking_model

COLUMNS = {"criteo": criteo_format.COLUMNS, "movielens": movielens.COLUMNS}


@pytest.mark.parametrize("path", sorted(SHIPPED_CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_a_shipped_config_fits_the_features_of_its_format(path: Path) -> None:
    config = load_config(path)
    own = COLUMNS[config.data.format]
    model = build_ranking_model(
        config.model, own.dense_names, own.sparse_names, transforms=own.transforms(), device="meta"
    )
    assert [feature.name for feature in model.features] == list(own.sparse_names)
