"""Pools of vectors and of bags against dictionaries in plain Python."""

import pytest
import torch

from tessera.training import KeyedJaggedTensor
from tessera.training.modules.keyed_jagged_tensor_pool import KeyedJaggedTensorPool
from tessera.training.modules.tensor_pool import TensorPool


def test_vectors_are_written_and_read_by_number(device):
    pool = TensorPool(pool_size=5, dim=2, dtype=torch.float32, device=device)
    vectors = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], device=device)
    pool.update(torch.tensor([3, 1, 3], device=device), vectors)
    asked = torch.tensor([1, 3, 0], dtype=torch.int32, device=device)
    assert pool(asked).tolist() == [[3, 4], [5, 6], [0, 0]]
    assert (pool.pool_size, pool.dim, pool.dtype) == (5, 2, torch.float32)
    assert pool.device.type == device.type
    ones = torch.ones(5, 2, device=device)
    other = TensorPool(5, 2, torch.float32, device, loaded_values=ones)
    other.load_state_dict(pool.state_dict())
    assert torch.equal(other.pool, pool.pool)
    assert list(pool.state_dict()) == ["_pool"]


def test_what_is_no_row_or_vector_is_told(device):
    pool = TensorPool(5, 2, torch.float32, device)
    for ids, error, message in (
        (torch.tensor([5]), IndexError, "id 5 is not one of the pool's 5 rows"),
        (torch.tensor([-1]), IndexError, "id -1"),
        (torch.tensor([1.0]), ValueError, "ids are torch.float32"),
        (torch.tensor([[1]]), ValueError, r"shape \[1, 1\]"),
    ):
        with pytest.raises(error, match=message):
            pool.lookup(ids.to(device))
    with pytest.raises(ValueError, match=r"shape \[1, 3\]; give torch.float32 of shape \[1, 2\]"):
        pool.update(torch.tensor([1], device=device), torch.ones(1, 3, device=device))
    integers = torch.ones(1, 2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"values are torch\.int64"):
        pool.update(torch.tensor([1], device=device), integers)
    with pytest.raises(ValueError, match="loaded_values are"):
        TensorPool(5, 2, torch.float32, loaded_values=torch.ones(5, 3))


def bags(seed, count, keys):
    """A KeyedJaggedTensor of ``count`` bags of each key, and the same as lists."""
    generator = torch.Generator().manual_seed(seed)
    lists = {
        key: [
            torch.randint(1, 100, (int(torch.randint(0, most + 1, (1,), generator=generator)),),
                          generator=generator).tolist()
            for _ in range(count)
        ]
        for key, most in keys.items()
    }  # fmt: skip
    flat = [each for key in keys for each in lists[key]]
    values = torch.tensor([value for bag in flat for value in bag], dtype=torch.int64)
    lengths = torch.tensor([len(bag) for bag in flat], dtype=torch.int64)
    weights = values / 7.0
    return KeyedJaggedTensor.from_lengths_sync(list(keys), values, lengths, weights), lists


@pytest.mark.parametrize("weighted", [False, True])
def test_bags_are_written_and_read_by_number(weighted, device):
    keys = {"a": 2, "b": 0, "c": 4}
    pool = KeyedJaggedTensorPool(6, keys, is_weighted=weighted, device=device)
    held = {row: {key: [] for key in keys} for row in range(6)}
    for seed, ids in enumerate(([4, 0, 2], [2, 5, 2, 4], [], [1])):
        # The features come in another order, and one too many.
        values, lists = bags(seed, len(ids), {"c": 4, "other": 3, "b": 0, "a": 2})
        pool.update(torch.tensor(ids, dtype=torch.int64, device=device), values.to(device))
        for place, row in enumerate(ids):
            held[row] = {key: lists[key][place] for key in keys}
    order = [2, 5, 0, 3, 2, 1]
    asked = torch.tensor(order, device=device)
    found = pool(asked)
    assert found.keys() == ["a", "b", "c"]
    assert found.lengths().tolist() == [len(held[row][key]) for key in keys for row in order]
    expected = [value for key in keys for row in order for value in held[row][key]]
    assert found.values().tolist() == expected
    assert found.lengths().dtype == torch.int32
    if weighted:
        assert found.weights().tolist() == (torch.tensor(expected) / 7.0).tolist()
    else:
        assert found.weights_or_none() is None
    other = KeyedJaggedTensorPool(6, keys, is_weighted=weighted, device=device)
    other.load_state_dict(pool.state_dict())
    assert torch.equal(other(asked).values(), found.values())
    assert set(pool.state_dict()) == {"values", "key_lengths", *(["weights"] if weighted else [])}
    assert (pool.pool_size, pool.values_dtype, pool.is_weighted) == (6, torch.int64, weighted)
    assert pool.feature_max_lengths == keys
    assert pool.lookup(asked[:0]).values().numel() == 0


def test_bags_that_do_not_fit_are_told():
    pool = KeyedJaggedTensorPool(6, {"a": 2})

    def kjt(key, values, lengths):
        return KeyedJaggedTensor.from_lengths_sync([key], values, torch.tensor(lengths))

    one = torch.tensor([1])
    with pytest.raises(KeyError, match="the values have no 'a'"):
        pool.update(one, kjt("b", one, [1]))
    with pytest.raises(ValueError, match="there are 1 ids and 2 bags"):
        pool.update(one, kjt("a", one, [1, 0]))
    with pytest.raises(ValueError, match="a bag of 'a' has 3 ids; the pool has room for 2"):
        pool.update(one, kjt("a", torch.tensor([1, 2, 3]), [3]))
    with pytest.raises(ValueError, match=r"values are torch.int32; the pool has torch.int64"):
        pool.update(one, kjt("a", one.int(), [1]))
