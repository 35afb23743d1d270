from __future__ import annotations

from pathlib import Path

import pytest

from tessera.errors import UserError
from tessera.training.config import ExperimentConfig
from tessera.training.data.config import DataConfig
from tessera.training.data.opening import open_data


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "crito"}, "format is 'crito'; give one of criteo, .*did you mean criteo"),
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
        ({"format": "movielens", "positive_rating": 6}, "positive_rating=6: MovieLens rates from"),
        ({"format": "movielens", "max_history": 0}, "max_history=0"),
        (
            {"format": "movielens", "features_until": "now"},
            "features_until='now': give one of train",
        ),
        ({"format": "movielens", "features": ()}, r"features=\[\]: give one or more"),
        ({"format": "movielens", "features": ("user", "user")}, "one or more different names"),
        ({"format": "movielens", "features": ("zip",)}, "features='zip': give one of user, item"),
        (
            {"format": "movielens", "labels": ("stars",)},
            "labels='stars': give one of positive, top",
        ),
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


def test_a_key_of_another_format_is_refused() -> None:
    def built(**data: object) -> ExperimentConfig:
        return ExperimentConfig.from_plain({"data": data}, name="c.yaml")

    with pytest.raises(UserError, match=r"data\.max_history: format criteo has no such key, movie"):
        built(format="criteo", path="a", max_history=5)
    with pytest.raises(
        UserError, match=r"format is missing; give one of criteo, custom, movielens"
    ):
        built(path="a")


def test_a_resolved_config_of_before_formats_had_keys_of_their_own() -> None:
    old = {
        "format": "movielens",
        "path": "/m",
        "valid_path": [],
        "test_path": [],
        "cache_dir": None,
        "split": "time",
        "valid_fraction": None,
        "test_fraction": None,
        "split_seed": 3,
        "strict": False,
        "workers": 2,
        "positive_rating": 3,
        "max_history": 7,
    }
    data = ExperimentConfig.from_plain({"data": old}, name="c.yaml").data
    assert data == DataConfig(
        format="movielens", path="/m", split="time", split_seed=3, positive_rating=3, max_history=7
    )


FACTORY = """
import numpy as np
from tessera.training.data import Dataset
from tessera.training.data.batch import make_batch
from tessera.training.data.columns import FeatureColumns, LabelColumn, SparseColumn

class Counted:
    columns = FeatureColumns(
        sparse=(SparseColumn(name="id"),), labels=(LabelColumn(name="even"),)
    )

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def labels(self, rows):
        return (np.asarray(rows) % 2 == 0).astype(np.float32)

    def batch(self, rows):
        return make_batch(
            dense=np.zeros((len(rows), 0), np.float32),
            keys=("id",),
            lengths=np.ones(len(rows), np.int32),
            values=np.asarray(rows, np.int64) % 4,
            labels=self.labels(rows),
        )

    def take(self, start, stop):
        return self.batch(np.arange(start, stop))

def counted(size):
    return Counted(size)

def nothing():
    return 3
"""


def test_a_dataset_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counted_rows.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    splits = open_data(
        DataConfig(factory="counted_rows:counted", arguments={"size": 1000}, valid_fraction=0.2)
    )
    views = (splits.train, splits.valid, splits.test)
    assert [len(view) for view in views] == [700, 200, 100]
    assert sorted(row for view in views for row in view.rows) == list(range(1000))
    with pytest.raises(UserError, match="returned a int without columns; return a tessera"):
        open_data(DataConfig(factory="counted_rows:nothing"))
    with pytest.raises(UserError, match="has no function absent; it has "):
        open_data(DataConfig(factory="counted_rows:absent"))
    with pytest.raises(UserError, match=r"give pkg\.module:function"):
        DataConfig(factory="counted_rows")
