"""Parts of sharded collections by themselves."""

import pytest
import torch
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.training import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from tessera.training.distributed import sharding_plan
from tessera.training.distributed.collections.pooled_output import PooledOutput
from tessera.training.distributed.comm.alltoall_pooled import All2AllPooledInfo
from tessera.training.distributed.comm.column_order import ColumnOrder
from tessera.training.distributed.embedding_sharding import EmbeddingShardingContext
from tessera.training.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    construct_output_kt,
    create_embedding_bag_sharding,
    create_sharding_infos_by_sharding,
)
from tessera.training.distributed.sharding.interfaces import OutputColumns, Part
from tessera.training.distributed.travel.bucketize import bucketize_kjt_before_all2all
from tessera.training.distributed.types import ParameterSharding, ShardingEnv
from tests.training.ranks import rank_device, run_on_ranks

pytestmark = pytest.mark.multi_gpu


def put_together():
    """Columns of two tables, cut and dealt so that they arrive out of order."""
    device, rank = rank_device(), dist.get_rank()
    torch.manual_seed(0)
    ebc = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(5, 8, name="s", feature_names=["x", "y"]),
            EmbeddingBagConfig(6, 12, name="t", feature_names=["z"]),
        ]
    )
    sharder = EmbeddingBagCollectionSharder()
    plan = sharding_plan.construct_module_sharding_plan(
        ebc,
        {
            "s": sharding_plan.column_wise([1, 0]),
            "t": sharding_plan.column_wise([1, 0, 1], [4, 4, 4]),
        },
        sharder,
        device_type=device.type,
    )
    infos = create_sharding_infos_by_sharding(ebc, plan)["column_wise"]
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharding = create_embedding_bag_sharding(
        "column_wise", infos, env, device, permute_embeddings=True
    )
    lookup = sharding.create_lookup()
    for table, values in lookup.table_shards():
        column = table.local_metadata.shard_offsets[1]
        whole = ebc.embedding_bags[table.name].weight.detach()
        values.data.copy_(whole[:, column : column + table.local_cols])
    kjt = KeyedJaggedTensor(
        ["x", "y", "z"], torch.arange(6) % 5, lengths=torch.tensor([1, 0, 2, 1, rank, 2 - rank])
    )
    sent = kjt.permute([kjt.keys().index(name) for name in sharding.feature_names()])
    arrived = sharding.create_input_dist()(sent.to(device)).wait().wait()
    ctx = EmbeddingShardingContext(batch_size_per_rank=[2, 2])
    values = sharding.create_output_dist()(lookup(arrived), ctx).wait()
    names, dims = sharding.embedding_names(), sharding.embedding_dims()
    found = construct_output_kt([values.cpu()], names, dims)
    torch.testing.assert_close(found.values(), ebc(kjt).values())
    return names, dims


def test_parts_of_vectors_are_put_together_where_that_is_asked_for():
    assert run_on_ranks(2, put_together) == [(["x", "y", "z"], [8, 8, 12])] * 2


@pytest.mark.parametrize("rows", [None, [[0, 3, 3, 10], [0, 0, 4, 6]]])
@pytest.mark.parametrize("weighted", [False, True])
def test_buckets_hold_the_ids_of_their_rows_in_order(rows, weighted):
    """Against plain loops; even blocks of 4 and 2 rows, and uneven ones."""
    bags = {"a": [[9, 0, 3], [], [4]], "b": [[5], [0, 1, 5, 4], [2]]}
    kjt = KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([id_ for own in bags.values() for bag in own for id_ in bag]),
        weights=torch.arange(10.0) if weighted else None,
        lengths=torch.tensor([len(bag) for own in bags.values() for bag in own]),
    )
    bounds = rows or [[0, 4, 8, 12], [0, 2, 4, 6]]
    found, places = bucketize_kjt_before_all2all(
        kjt,
        3,
        torch.tensor([4, 2]),
        output_permute=True,
        block_bucketize_row_pos=None if rows is None else [torch.tensor(b) for b in rows],
    )
    assert found.keys() == ["a", "b"] * 3
    expected, lengths, source = [], [], []
    for bucket in range(3):
        number = 0
        for feature, own in enumerate(bags.values()):
            first, last = bounds[feature][bucket], bounds[feature][bucket + 1]
            for bag in own:
                inside = [
                    (id_ - first, number + n) for n, id_ in enumerate(bag) if first <= id_ < last
                ]
                number += len(bag)
                expected += [id_ for id_, _ in inside]
                source += [place for _, place in inside]
                lengths.append(len(inside))
    assert found.values().tolist() == expected
    assert found.lengths().tolist() == lengths
    assert [places.tolist().index(place) for place in range(10)] == source
    if weighted:
        assert found.weights().tolist() == [float(place) for place in source]


def test_positions_go_along_where_they_are_asked_for():
    kjt = KeyedJaggedTensor(["a"], torch.tensor([5, 0, 4, 1]), lengths=torch.tensor([3, 1]))
    found, _ = bucketize_kjt_before_all2all(kjt, 2, torch.tensor([3]), bucketize_pos=True)
    assert found.values().tolist() == [0, 1, 2, 1]
    assert found.weights().tolist() == [1.0, 0.0, 0.0, 2.0]
    with pytest.raises(ValueError, match="block_sizes has 2 entries; give one for each of 1 keys"):
        bucketize_kjt_before_all2all(kjt, 2, torch.tensor([3, 3]))


def test_columns_change_places_and_back():
    """Against slices: rank 1 of three has no columns."""
    pieces = [(2, 3, 2), (0, 1, 3), (2, 0, 1), (0, 0, 1), (2, 1, 2)]
    order = ColumnOrder([4, 0, 5], pieces)
    assert not order.is_rank_by_rank
    assert ColumnOrder([4, 0, 5], [(0, 0, 2), (0, 2, 2), (2, 0, 5)]).is_rank_by_rank
    blocks = {0: torch.randn(3, 4), 1: torch.randn(3, 0), 2: torch.randn(3, 5)}
    expected = torch.cat([blocks[r][:, first : first + width] for r, first, width in pieces], 1)
    flat = torch.cat([block.flatten() for block in blocks.values()])
    assert torch.equal(order.join(flat, 3), expected)
    assert torch.equal(order.permute(torch.cat(list(blocks.values()), 1)), expected)
    assert torch.equal(order.split(expected), flat)
    assert order.join(flat[:0], 0).shape == (0, 9)
    assert order.split(expected[:0]).shape == (0,)


class Calls(TorchDispatchMode):
    """Notes which operators are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


def test_a_gradient_that_is_a_part_of_another_goes_back_without_a_copy_of_it():
    order = ColumnOrder([2, 3], [(1, 0, 2), (0, 0, 2), (1, 2, 1)])
    info = All2AllPooledInfo([4, 4], [2, 3], None, None, order=order)
    gradient = torch.randn(4, 9)[:, 3:8]
    with Calls() as calls:
        flat = info.lay_out_gradient((gradient,))
    assert "aten::clone" not in calls.names
    assert torch.equal(flat, order.split(gradient.contiguous()))
    assert torch.equal(order.join(flat, 4), gradient)


def test_outputs_of_two_dtypes_are_converted_once_each_and_not_piece_by_piece():
    names = list("abcdefgh")
    parts = [
        [Part(f"f_{name}", OutputColumns(name, 0, 2)) for name in own] for own in ("aceg", "bdfh")
    ]
    output = PooledOutput(names, [2] * 8, parts)
    narrow = torch.randn(3, 8).bfloat16().requires_grad_()
    wide = torch.randn(3, 8, requires_grad=True)
    weight = torch.randn(3, 16)
    with Calls() as calls:
        joined = output.join([narrow, wide]).values()
        (joined * weight).sum().backward()
    assert calls.names.count("aten::_to_copy") == 2  # there and back
    assert joined.dtype == torch.float32

    def of(first):
        """Every other pair of columns."""
        return [column for pair in range(first, 16, 4) for column in (pair, pair + 1)]

    assert torch.equal(joined[:, of(0)], narrow.float())
    assert torch.equal(joined[:, of(2)], wide)
    assert torch.equal(narrow.grad, weight[:, of(0)].bfloat16())
    assert torch.equal(wide.grad, weight[:, of(2)])


def test_a_batch_that_varies_per_feature_needs_no_process_group():
    plain = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(5, 8, name="s", feature_names=["x", "y"]),
            EmbeddingBagConfig(6, 12, name="t", feature_names=["z"], pooling=PoolingType.MEAN),
        ]
    )
    whole = KeyedJaggedTensor(
        ["z", "x", "y"],
        torch.tensor([5, 5, 1, 5, 5, 2, 3, 4, 0, 0, 0]),
        lengths=torch.tensor([2, 1, 2, 1, 1, 1, 1, 1, 1]),
    )
    shared = KeyedJaggedTensor(
        ["z", "x", "y"],
        torch.tensor([5, 5, 1, 2, 3, 4, 0]),
        lengths=torch.tensor([2, 1, 1, 1, 1, 1]),
        stride_per_key_per_rank=[[2], [3], [1]],
        inverse_indices=(["z", "x", "y"], torch.tensor([[0, 1, 0], [0, 1, 2], [0, 0, 0]])),
    )
    expected = plain(whole)
    sharded = EmbeddingBagCollectionSharder().shard(
        plain, {"s": ParameterSharding(), "t": ParameterSharding()}, ShardingEnv.from_local(1, 0)
    )
    for batch in (shared, whole):
        found = sharded(batch)
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found.values(), expected.values())
    bare = KeyedJaggedTensor(
        ["z", "x", "y"], shared.values(), lengths=shared.lengths(), stride_per_key=[2, 3, 1]
    )
    with pytest.raises(ValueError, match="no inverse_indices to tell which bag each sample uses"):
        sharded(bare)
