"""Ids there and vectors back, against lists of bags."""

import re
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist

from tessera.training import KeyedJaggedTensor
from tessera.training.distributed import dist_data
from tessera.training.distributed.dist_data import KJTAllToAll, get_recat
from tessera.training.distributed.travel.batch_kind import batch_kind, describe_kind
from tests.training.ranks import rank_device, run_on_ranks

WORLDS = [1, 2, 4]
BATCHES = [(3, 3, 3, 3), (2, 0, 4, 1), (0, 5, 0, 0), (0, 0, 0, 0)]
SPLITS = [(1, 1, 1, 1), (2, 0, 1, 3), (0, 3, 0, 0)]


def random_bags(features, batch):
    """``[features][batch]`` lists of (id, weight)."""
    return [
        [
            [(int(i), float(i) / 8) for i in torch.randint(0, 100, (int(n),))]
            for n in torch.randint(0, 4, (batch,))
        ]
        for _ in range(features)
    ]


def tensor_of(bags, *, weighted, id_dtype=torch.int64, **strides):
    flat = [entry for feature in bags for bag in feature for entry in bag]
    return KeyedJaggedTensor(
        keys=[f"f{index}" for index in range(len(bags))],
        values=torch.tensor([i for i, _ in flat], dtype=id_dtype),
        weights=torch.tensor([w for _, w in flat]) if weighted else None,
        lengths=torch.tensor([len(bag) for f in bags for bag in f], dtype=torch.int32),
        **strides,
    ).to(rank_device())


def bags_of(kjt):
    """``[features]`` lists of bags of ids, and of weights."""
    ids, weights = [], []
    for jagged in kjt.to(torch.device("cpu")).to_dict().values():
        ids.append([bag.tolist() for bag in jagged.to_dense()])
        if kjt.weights_or_none() is not None:
            weights.append([bag.tolist() for bag in jagged.to_dense_weights()])
    return ids, weights


def ids(bags):
    return [[[i for i, _ in bag] for bag in feature] for feature in bags]


def weights(bags):
    return [[[w for _, w in bag] for bag in feature] for feature in bags]


def _kjt_all_to_all(stagger):
    rank, world = dist.get_rank(), dist.get_world_size()
    sources = torch.arange(world).view(stagger, -1).t().flatten().tolist()
    for weighted in (False, True):
        for batches in (case[:world] for case in BATCHES):
            for splits in (list(case[:world]) for case in SPLITS):
                whole = [random_bags(sum(splits), batch) for batch in batches]
                first = sum(splits[:rank])
                own = range(first, first + splits[rank])
                kind = torch.int32 if weighted else torch.int64
                kjt = tensor_of(whole[rank], weighted=weighted, id_dtype=kind, stride=batches[rank])
                tensors = KJTAllToAll(dist.group.WORLD, splits, stagger)(kjt).wait()
                assert tensors.stride_per_rank == list(batches)
                received = tensors.wait()
                assert received.keys() == [f"f{index}" for index in own]
                assert received.stride() == sum(batches)
                assert received.values().dtype == kind
                found_ids, found_weights = bags_of(received)
                expected = [[bag for s in sources for bag in whole[s][f]] for f in own]
                assert found_ids == ids(expected)
                # Told by the senders, not counted here.
                counts = [sum(map(len, feature)) for feature in expected]
                assert received.length_per_key() == counts
                if weighted:
                    assert found_weights == weights(expected)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", WORLDS)
def test_bags_reach_the_rank_of_their_feature(world):
    run_on_ranks(world, _kjt_all_to_all, 1)


@pytest.mark.multi_gpu
def test_staggered_bags_come_by_place_on_the_node():
    run_on_ranks(4, _kjt_all_to_all, 2)


def _varying():
    """Every feature has a batch size of its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for splits in (list(case[:world]) for case in SPLITS):
        features = sum(splits)
        strides = torch.randint(0, 4, (world, features)).tolist()
        whole = [[random_bags(1, strides[r][f])[0] for f in range(features)] for r in range(world)]
        per_rank = [[stride] for stride in strides[rank]]
        kjt = tensor_of(whole[rank], weighted=True, stride_per_key_per_rank=per_rank)
        received = KJTAllToAll(dist.group.WORLD, splits)(kjt).wait().wait()
        first = sum(splits[:rank])
        own = range(first, first + splits[rank])
        expected = [[bag for source in whole for bag in source[f]] for f in own]
        if world > 1:
            assert received.stride_per_key_per_rank() == [
                [strides[r][f] for r in range(world)] for f in own
            ]
        found_ids, found_weights = bags_of(received)
        assert found_ids == ids(expected)
        assert found_weights == weights(expected)
        assert received.length_per_key() == [sum(map(len, feature)) for feature in expected]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", WORLDS)
def test_bags_of_batches_that_vary_per_feature_arrive_too(world):
    run_on_ranks(world, _varying)


def _there_and_back():
    """Ids travel, a stand-in for the tables makes vectors of them, and those travel back."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device = rank_device()
    for batches in (case[:world] for case in BATCHES):
        for splits in (list(case[:world]) for case in SPLITS):
            bags = random_bags(sum(splits), batches[rank])
            kjt = tensor_of(bags, weighted=False, stride=batches[rank])
            tensors = KJTAllToAll(dist.group.WORLD, splits)(kjt).wait()
            received = tensors.wait()
            vectors = received.values().float().unsqueeze(1) + torch.arange(4.0, device=device)
            vectors.requires_grad_()
            module = dist_data.SequenceEmbeddingsAllToAll(dist.group.WORLD, splits, device)
            for recat in (None, tensors.recat):
                vectors.grad = None
                back = module(
                    vectors,
                    received.lengths(),
                    tensors.input_splits["values"],
                    tensors.output_splits["values"],
                    batch_size_per_rank=tensors.stride_per_rank,
                    sparse_features_recat=recat,
                ).wait()
                expected = kjt.values().float().unsqueeze(1) + torch.arange(4.0, device=device)
                assert torch.equal(back, expected)
                # A gradient that tells the vectors apart finds its way as well.
                (back * expected.square()).sum().backward()
                assert torch.allclose(vectors.grad * world, vectors.detach().square())


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", WORLDS)
def test_a_vector_per_id_comes_back_in_the_order_of_the_ids(world):
    run_on_ranks(world, _there_and_back)


def _modules():
    rank, world = dist.get_rank(), dist.get_world_size()
    device = rank_device()
    dims = [2, 3, 1, 4][:world]
    doubled = dist_data.PooledEmbeddingsAllToAll(
        dist.group.WORLD, dims, device, callbacks=[lambda t: t * 2]
    )
    doubled.callbacks.append(lambda t: t + 1)
    # Row b of the global batch is b everywhere; without sizes the shares are equal.
    rows = torch.arange(3.0 * world, device=device).unsqueeze(1)
    own = torch.arange(3.0, device=device).unsqueeze(1) + 3 * rank
    out = doubled(rows.expand(-1, dims[rank])).wait()
    assert torch.equal(out, (own * 2 + 1).expand(-1, sum(dims)))

    summed = dist_data.PooledEmbeddingsReduceScatter(dist.group.WORLD)(rows * (rank + 1)).wait()
    assert torch.equal(summed, own * sum(range(1, world + 1)))

    uneven = [3, 0, 1, 2][:world]
    bounds = [0, *accumulate(uneven)]
    summed = dist_data.PooledEmbeddingsReduceScatter(dist.group.WORLD)(
        rows[: bounds[-1]], input_splits=uneven
    ).wait()
    assert torch.equal(summed, rows[bounds[rank] : bounds[rank + 1]] * world)

    per_feature = dist_data.VariableBatchPooledEmbeddingsReduceScatter(dist.group.WORLD)
    flat = torch.ones(sum(2 * b + 5 * b for b in uneven), device=device)
    summed = per_feature(flat, [[b, b] for b in uneven], [2, 5]).wait()
    assert torch.equal(summed, torch.full((7 * uneven[rank],), float(world), device=device))

    varying = dist_data.VariableBatchPooledEmbeddingsAllToAll(
        dist.group.WORLD, [[d] for d in dims], device, callbacks=[lambda t: -t]
    )
    flat = torch.full((sum(uneven) * dims[rank],), float(rank), device=device)
    out = varying(flat, [[b] for b in uneven], [uneven[rank]] * world).wait()
    assert out.tolist() == [-r for r in range(world) for _ in range(uneven[rank] * dims[r])]
    assert len(varying.callbacks) == 1

    gathered = dist_data.PooledEmbeddingsAllGather(dist.group.WORLD)(own).wait()
    assert torch.equal(gathered, rows)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", WORLDS)
def test_modules_around_the_collectives(world):
    run_on_ranks(world, _modules)


def test_recat_of_two_features_from_three_sources():
    # Arrived: (s0 f0) (s0 f1) (s1 f0) (s1 f1) (s2 f0) (s2 f1).
    assert get_recat(2, 3).tolist() == [0, 2, 4, 1, 3, 5]
    # Batches of 1, 2, 0: bags 0 | 1 | 2 3 | 4 5 | |.
    assert get_recat(2, 3, batch_size_per_rank=[1, 2, 0]).tolist() == [0, 2, 3, 1, 4, 5]
    # Two nodes of two ranks: sources in the order 0, 2, 1, 3.
    assert get_recat(1, 4, stagger=2).tolist() == [0, 2, 1, 3]
    assert get_recat(0, 4) is None


KINDS = [
    ({}, {"id_dtype": torch.int32}, "int64 ids, .* int32 ids"),
    ({"weighted": True}, {}, "float32 weights .* no weights"),
    ({"stride_per_key_per_rank": [[1], [1]]}, {"stride": 1}, "for each feature, .* one batch size"),
]


def _of_two_kinds():
    rank = dist.get_rank()
    bags = random_bags(2, 1)
    send = KJTAllToAll(dist.group.WORLD, [1, 1])
    for first, second, said in KINDS:
        own = first if rank == 0 else second
        kjt = tensor_of(bags, **{"weighted": False, **own})
        pattern = rf"differ in kind: rank {rank} has"
        with pytest.raises(ValueError, match=pattern) as raised:
            send(kjt).wait()
        if rank == 0:
            assert re.search(said, str(raised.value))
        # Nothing is left on the way: the next batch arrives.
        assert send(tensor_of(bags, weighted=False)).wait().wait().stride() == 2


@pytest.mark.multi_gpu
def test_ranks_whose_batches_differ_in_kind_are_told_so():
    run_on_ranks(2, _of_two_kinds)


def _sizes_both_ways():
    rank, world, device = dist.get_rank(), dist.get_world_size(), rank_device()
    rows = torch.arange(3 * world, device=device).view(3, world) + 100 * rank
    return [
        dist_data.SplitsAllToAllAwaitable(sizes, dist.group.WORLD).wait()
        for sizes in (list(rows), rows)
    ]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", WORLDS)
def test_sizes_are_exchanged_from_a_list_or_from_the_rows_of_one_tensor(world):
    for rank, found in enumerate(run_on_ranks(world, _sizes_both_ways)):
        expected = [
            [100 * sender + row * world + rank for sender in range(world)] for row in range(3)
        ]
        assert found == [expected, expected]


def test_batches_of_one_kind_are_described():
    bags = [[[(3, 0.5)]]]
    kinds = [
        batch_kind(tensor_of(bags, weighted=weighted, id_dtype=dtype))
        for weighted in (False, True)
        for dtype in (torch.int32, torch.int64)
    ]
    assert len(set(kinds)) == 4
    assert describe_kind(kinds[2]) == "int32 ids, int32 lengths, float32 weights and one batch size"


def _wrong_splits():
    with pytest.raises(ValueError, match=r"splits \[1, 2\] must hold one number per rank"):
        KJTAllToAll(dist.group.WORLD, [1, 2])


def test_splits_of_another_world_are_refused():
    run_on_ranks(1, _wrong_splits)
