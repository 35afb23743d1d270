"""Small functions under TorchRec's paths, and the checks of a batch as a function."""

import pytest
import torch
from torch import nn

from tessera.training import EmbeddingBagConfig, KeyedJaggedTensor
from tessera.training.distributed.embedding_lookup import EmbeddingComputeKernel
from tessera.training.distributed.embedding_types import ModuleSharder, ShardingType
from tessera.training.distributed.sharding_plan import EmbeddingCollectionSharder
from tessera.training.distributed.utils import (
    add_prefix_to_state_dict,
    append_prefix,
    copy_to_device,
    filter_state_dict,
    none_throws,
)
from tessera.training.models.dlrm import choose
from tessera.training.sparse.jagged_tensor_validator import validate_keyed_jagged_tensor


def test_names_of_state_dicts():
    state = {"a.b": 1, "a.c.d": 2, "ab.c": 3}
    assert filter_state_dict(state, "a") == {"b": 1, "c.d": 2}
    add_prefix_to_state_dict(state, "x.")
    assert list(state.items()) == [("x.a.b", 1), ("x.a.c.d", 2), ("x.ab.c", 3)]
    assert [append_prefix("a", "b"), append_prefix("", "b"), append_prefix("a", "")] == ["a.b", "b", "a"]  # fmt: skip


def test_none_throws():
    assert none_throws(0) == 0
    with pytest.raises(AssertionError, match="no model"):
        none_throws(None, "no model")


def test_a_copy_on_another_device_leaves_the_module_as_it_is():
    module = nn.BatchNorm1d(3)
    module.other = nn.Parameter(torch.empty(2, device="meta"))
    copied = copy_to_device(module, torch.device("cpu"), torch.device("cpu"))
    assert torch.equal(copied.weight, module.weight)
    assert isinstance(copied.weight, nn.Parameter)
    assert copied.other is module.other
    moved = copy_to_device(module, torch.device("cpu"), torch.device("meta"))
    assert moved.weight.is_meta
    assert moved.running_mean.is_meta
    assert not module.weight.is_meta


def test_names_that_programs_take_from_other_modules():
    assert ShardingType.ROW_WISE.value == "row_wise"
    assert EmbeddingComputeKernel.FUSED.value == "fused"
    assert issubclass(EmbeddingCollectionSharder, ModuleSharder)


def test_pairs_of_things():
    assert [choose(5, 2), choose(5, 0), choose(2, 5), choose(5, -1)] == [10, 1, 0, 0]


def kjt(values=(1, 2, 3), lengths=(1, 2), keys=("a", "b"), **more):
    lengths = None if lengths is None else torch.tensor(lengths)
    return KeyedJaggedTensor(list(keys), torch.tensor(values), lengths=lengths, validate=False, **more)  # fmt: skip


def test_a_batch_that_fits():
    assert validate_keyed_jagged_tensor(kjt())
    assert validate_keyed_jagged_tensor(kjt(lengths=(1, 0, 2), stride_per_key_per_rank=[[1], [2]]))
    tables = [EmbeddingBagConfig(3, 4, name="t", feature_names=["b"])]
    assert validate_keyed_jagged_tensor(kjt((9, 2, 0)), tables)


def test_ids_that_are_no_rows_are_logged(caplog):
    tables = [EmbeddingBagConfig(3, 4, name="t", feature_names=["b", "c"])]
    assert not validate_keyed_jagged_tensor(kjt(), tables)
    assert "feature 'b' has ids from 2 to 3; its table has 3 rows" in caplog.text


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"lengths": (1, 1)}, "lengths add up to 2 but there are 3 values"),
        ({"lengths": None}, "lengths and offsets are both None"),
        ({"keys": ("a", "a")}, "name a feature twice"),
        ({"weights": torch.ones(2)}, "weights has 2 entries but values has 3"),
        ({"lengths": (1, 1, 1)}, "3"),
        ({"lengths": (1, 2), "stride_per_key_per_rank": [[1], [2]]}, "strides per key are"),
    ],
)
def test_a_batch_that_does_not_fit_is_told(batch, message):
    with pytest.raises(ValueError, match=message):
        validate_keyed_jagged_tensor(kjt(**batch))
