from __future__ import annotations

import json

import pytest
import torch

from tessera.errors import UserError
from tessera.training.data.batch import Batch
from tessera.training.data.columns import (
    ColumnConfig,
    DenseColumn,
    FeatureColumns,
    LabelColumn,
    SparseColumn,
)
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "number"}, "kind='number': give one of dense, categorical"),
        ({"kind": "dense", "side": "left"}, "side='left': give one of user, item, context"),
        ({"kind": "dense", "table": "t"}, "table='t': a column of kind dense has none; .*sequence"),
        ({"kind": "categorical", "max_length": 5}, "max_length=5: a column of kind categorical"),
        ({"kind": "sequence", "max_length": 0}, "max_length=0: give at least 1"),
        ({"kind": "sequence", "weights": "w"}, "weights='w': .*give kind weighted_list"),
        ({"kind": "dense", "task": "binary"}, "task='binary': a column of kind dense has none"),
        ({"kind": "label", "side": "user"}, "side='user': a column of kind label has none"),
        ({"kind": "dense", "column": ""}, "column='': give a name"),
        ({"kind": "categorical", "table": "a.b"}, "table='a.b': give a name without a dot"),
        ({"kind": "dense", "transform": (3,)}, "transform=3: give a name, or a mapping of one"),
        ({"kind": "dense", "transform": ({"a": 1, "b": 2},)}, "transform={'a': 1, 'b': 2}: give"),
    ],
)
def test_a_wrong_field_of_a_column_is_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ColumnConfig(**fields)


def test_columns_survive_json() -> None:
    columns = FeatureColumns(
        dense=(DenseColumn(name="price", side="item", transform=({"clip": [0, 10]}, "log1p")),),
        sparse=(SparseColumn(name="tags", kind="categorical_list", table="t", strings=True),),
        labels=(LabelColumn(name="click"), LabelColumn(name="seconds", task="regression")),
        weight="w",
        group="uid",
    )
    plain = json.loads(json.dumps(columns.to_json()))
    assert FeatureColumns.from_json(plain, name="here") == columns
    assert columns.dense_names == ("price",)
    assert columns.sparse_names == ("tags",)
    assert columns.label_names == ("click", "seconds")


@pytest.mark.parametrize("whole", [True, False])
def test_a_batch_moves_with_the_parts_that_it_has(whole: bool) -> None:  # noqa: FBT001
    batch = Batch(
        dense_features=torch.ones(2, 1),
        sparse_features=KeyedJaggedTensor(["a"], torch.tensor([4]), lengths=torch.tensor([1, 0])),
        labels=torch.zeros(2),
        weights=torch.tensor([0.5, 2.0]) if whole else None,
        row_numbers=torch.tensor([7, 9]) if whole else None,
    )
    there = batch.to(torch.device("cpu"))
    assert there is not batch
    assert there.size == 2
    assert torch.equal(there.labels, batch.labels)
    assert torch.equal(there.sparse_features.values(), torch.tensor([4]))
    if whole:
        assert torch.equal(there.weights, torch.tensor([0.5, 2.0]))
        assert torch.equal(there.row_numbers, torch.tensor([7, 9]))
    else:
        assert there.weights is None
        assert there.row_numbers is None
