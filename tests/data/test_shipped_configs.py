from __future__ import annotations

from pathlib import Path

import pytest

from tessera.training.config import SHIPPED_CONFIGS, load_config
from tessera.training.data.columns import FeatureColumns
from tessera.training.data.config import DataConfig
from tessera.training.data.criteo_format import COLUMNS as CRITEO
from tessera.training.data.formats.movielens import MovieLensConfig
from tessera.training.data.movielens import columns_of
from tessera.training.models.ranking import build_ranking_model


def columns(data: DataConfig) -> FeatureColumns:
    if isinstance(data, MovieLensConfig):
        return columns_of(data.features, data.labels)
    assert data.format == "criteo"
    return CRITEO


@pytest.mark.parametrize("path", sorted(SHIPPED_CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_a_shipped_config_fits_the_features_of_its_format(path: Path) -> None:
    config = load_config(path)
    own = columns(config.data)
    model = build_ranking_model(
        config.model, own.dense_names, own.sparse_names, transforms=own.transforms(), device="meta"
    )
    assert [feature.name for feature in model.features] == list(own.sparse_names)
