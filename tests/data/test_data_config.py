from __future__ import annotations

from pathlib import Path

import pytest

from tessera.errors import UserError
from tessera.training.data.config import DataConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "csv"}, "format='csv': give one of criteo, movielens"),
        ({"split": "hash"}, "split='hash': give one of"),
        ({"path": ""}, "path='': an empty path"),
        ({"path": ()}, r"path=\(\): name a file"),
        ({"path": 3}, "path=3: give a path"),
        ({"path": ("a", "")}, "path=.*an empty path"),
        ({"cache_dir": ""}, "cache_dir='': name a folder"),
        ({"valid_fraction": 1.0}, "valid_fraction=1.0: give a share"),
        ({"test_fraction": -0.1}, "test_fraction=-0.1: give a share"),
        ({"valid_fraction": 0.5, "test_fraction": 0.5}, "valid_fraction=0.5: .*nothing is left"),
        ({"valid_path": "v", "valid_fraction": 0.1}, "valid_fraction=0.1: valid_path already"),
        ({"split_seed": -1}, "split_seed=-1"),
        ({"workers": -1}, "workers=-1"),
        ({"positive_rating": 6}, "positive_rating=6: MovieLens rates from 1 to 5"),
        ({"max_history": 0}, "max_history=0"),
        ({"format": "movielens", "valid_path": "v"}, "valid_path='v': only Criteo"),
        ({"format": "movielens", "path": ("a", "b")}, "path=.*one folder"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_remedy(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        DataConfig(**{"format": "criteo", "path": "a.tsv", **fields})


def test_shares_that_are_held_out() -> None:
    def held_out(**fields: object) -> tuple[float, float]:
        return DataConfig(format="criteo", path="a", **fields).held_out()

    assert held_out() == (0.1, 0.1)
    assert held_out(valid_fraction=0.2) == (0.2, 0.1)
    assert held_out(valid_path="v") == (0.0, 0.1)
    assert held_out(valid_path="v", test_path="t") == (0.0, 0.0)
    assert held_out(test_path="t", test_fraction=0.0) == (0.1, 0.0)


def test_resolved_paths_are_absolute() -> None:
    config = DataConfig(
        format="criteo", path=("a.tsv", "/b.tsv"), valid_path="v", cache_dir="cache"
    ).resolved(Path("/base"))
    assert config.path == ("/base/a.tsv", "/b.tsv")
    assert config.valid_path == "/base/v"
    assert config.test_path == ()
    assert config.cache_dir == "/base/cache"
    assert config.resolved(Path("/other")) == config
