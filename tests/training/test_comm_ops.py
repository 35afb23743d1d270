"""Every collective, forwards and backwards, against the same arithmetic in one process.

A case builds the inputs of all ranks from a seed, so that every rank can work out what all of
them should get: the outputs by cat and split, the gradients by autograd through those.
"""

from itertools import accumulate

import pytest
import torch
import torch.distributed as dist

from tessera.training.distributed import comm_ops
from tessera.training.distributed.types import NoWait
from tests.training.ranks import rank_device, run_on_ranks

WORLDS = [1, 2, 4]


def check(inputs, simulate, run, *, forward_atol=0.0, backward_atol=1e-6):
    """Hold ``run(own inputs)`` against ``simulate(all inputs)``.

    ``inputs`` is a list of tensors per rank, ``simulate`` returns the list of outputs per rank.
    The gradients are those of a weighted sum of all outputs, divided by the number of ranks.
    Sums over ranks run in rank order on both sides, so forwards no difference is allowed.
    """
    rank, world, device = dist.get_rank(), dist.get_world_size(), rank_device()
    whole = [[t.clone().requires_grad_() for t in tensors] for tensors in inputs]
    outputs = simulate(whole)
    factors = [[torch.randn(o.shape) for o in tensors] for tensors in outputs]
    loss = sum(
        (o * f).sum()
        for tensors, fs in zip(outputs, factors, strict=True)
        for o, f in zip(tensors, fs, strict=True)
    )
    (loss / world).backward()

    own = [t.clone().to(device).requires_grad_() for t in inputs[rank]]
    found = run(own)
    assert len(found) == len(outputs[rank])
    for f, o in zip(found, outputs[rank], strict=True):
        assert f.shape == o.shape
        torch.testing.assert_close(f.detach().cpu(), o.detach(), rtol=0, atol=forward_atol)
    sum((f * g.to(device)).sum() for f, g in zip(found, factors[rank], strict=True)).backward()
    for mine, reference in zip(own, whole[rank], strict=True):
        expected = torch.zeros_like(reference) if reference.grad is None else reference.grad
        torch.testing.assert_close(mine.grad.cpu(), expected, rtol=1e-5, atol=backward_atol)


def sizes(world, cases):
    """The first ``world`` numbers of each case."""
    return [case[:world] for case in cases]


BATCHES = [(3, 3, 3, 3), (2, 0, 4, 1), (0, 5, 0, 0), (0, 0, 0, 0)]
DIMS = [(4, 4, 4, 4), (8, 4, 0, 12), (0, 6, 0, 2), (0, 0, 0, 0)]


def _pooled():
    world = dist.get_world_size()
    for batches in sizes(world, BATCHES):
        for dims in sizes(world, DIMS):
            inputs = [[torch.randn(sum(batches), d)] for d in dims]

            def simulate(whole, batches=batches):
                per_rank = [tensors[0].split(batches) for tensors in whole]
                return [[torch.cat([p[r] for p in per_rank], 1)] for r in range(world)]

            def run(own, batches=batches, dims=dims):
                dims_tensor = torch.tensor(dims, device=rank_device())
                awaitable = comm_ops.alltoall_pooled(
                    own[0],
                    list(batches),
                    list(dims),
                    dims_tensor,
                    dims_tensor.cumsum(0) - dims_tensor,
                )
                return [awaitable.wait()]

            check(inputs, simulate, run)


def _variable_batch_pooled():
    rank, world = dist.get_rank(), dist.get_world_size()
    dims = [[2], [3, 5], [], [4]][:world]
    features = [(owner, d) for owner in range(world) for d in dims[owner]]
    # samples[r][f]: what rank r asks of feature f, features in the order of their owners
    for samples in (
        [[2, 1, 3, 0], [1, 2, 2, 4], [0, 0, 0, 0], [3, 0, 1, 1]],
        [[0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]],
    ):
        asked = [row[: len(features)] for row in samples[:world]]
        first = [0, *accumulate(len(d) for d in dims)]

        def block(r, f, asked=asked):
            return asked[r][f] * features[f][1]

        def owned(o, first=first):
            return range(first[o], first[o + 1])

        inputs = [
            [torch.randn(sum(block(r, f) for r in range(world) for f in owned(o)))]
            for o in range(world)
        ]

        def simulate(whole, block=block, owned=owned):
            parts = [
                tensors[0].split([sum(block(r, f) for f in owned(o)) for r in range(world)])
                for o, tensors in enumerate(whole)
            ]
            return [[torch.cat([part[r] for part in parts])] for r in range(world)]

        def run(own, asked=asked, owned=owned):
            mine = [[asked[r][f] for f in owned(rank)] for r in range(world)]
            awaitable = comm_ops.variable_batch_alltoall_pooled(own[0], mine, asked[rank], dims)
            return [awaitable.wait()]

        check(inputs, simulate, run)


def _sequence():
    """Ids go from source s to the owner of their feature; their vectors come back."""
    rank, world = dist.get_rank(), dist.get_world_size()
    D, B = 5, 3
    for per_owner in ([1, 2, 1, 1], [2, 0, 1, 3], [0, 3, 0, 0]):
        owned = per_owner[:world]
        # lengths[s][o]: [features of o, B] ids that source s sends to owner o
        lengths = [[torch.randint(0, 4, (f, B)) for f in owned] for _ in range(world)]
        lengths[0] = [torch.zeros_like(part) for part in lengths[0]]  # a rank without ids
        count = [[int(part.sum()) for part in source] for source in lengths]
        inputs = [[torch.randn(sum(count[s][o] for s in range(world)), D)] for o in range(world)]

        def pieces(whole, o, lengths=lengths, owned=owned):
            """pieces[f][s]: the vectors of owner o's feature f for source s."""
            flat = [int(lengths[s][o][f].sum()) for f in range(owned[o]) for s in range(world)]
            parts = whole[o][0].split(flat) if flat else []
            return [parts[f * world : (f + 1) * world] for f in range(owned[o])]

        def simulate(whole, pieces=pieces, owned=owned):
            by_owner = [pieces(whole, o) for o in range(world)]
            return [
                [
                    torch.cat(
                        [
                            whole[0][0][:0],
                            *(by_owner[o][f][s] for o in range(world) for f in range(owned[o])),
                        ]
                    )
                ]
                for s in range(world)
            ]

        def run(own, lengths=lengths, owned=owned, count=count):
            features = owned[rank]
            forward = torch.tensor(
                [f * world + s for s in range(world) for f in range(features)], dtype=torch.int32
            )
            backward = torch.argsort(forward)
            after = torch.cat(
                [lengths[s][rank][f] for f in range(features) for s in range(world)]
                or [torch.empty(0, dtype=torch.int64)]
            )
            device = rank_device()
            awaitable = comm_ops.alltoall_sequence(
                own[0],
                forward.to(device),
                backward.to(device),
                after.to(device),
                input_splits=count[rank],
                output_splits=[count[s][rank] for s in range(world)],
            )
            return [awaitable.wait()]

        check(inputs, simulate, run)


def _alltoallv():
    world = dist.get_world_size()
    for total in (4 * world, 4 * world + 1, 0):
        splits = comm_ops.alltoallv.__globals__["even_splits"](total, world)
        dims = [[2, 3], [4], [1, 1, 1], [5]][:world]
        inputs = [[torch.randn(total, d) for d in own] for own in dims]

        def simulate(whole, splits=splits):
            joined = [torch.cat(tensors, 1).split(splits) for tensors in whole]
            return [[part[r] for part in joined] for r in range(world)]

        def run(own, dims=dims):
            return comm_ops.alltoallv(own, out_split=[sum(d) for d in dims]).wait()

        check(inputs, simulate, run)


def _dense():
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = [[(r + 2 * c) % 3 for c in range(world)] for r in range(world)]
    inputs = [[torch.randn(sum(own), 2, 3)] for own in rows]

    def simulate(whole):
        parts = [tensors[0].split(own) for tensors, own in zip(whole, rows, strict=True)]
        return [[torch.cat([part[r] for part in parts])] for r in range(world)]

    def run(own):
        arriving = [source[rank] for source in rows]
        return [comm_ops.alltoall_dense(own[0], rows[rank], arriving).wait()]

    check(inputs, simulate, run)


def _added(whole, batches):
    total = whole[0][0]
    for tensors in whole[1:]:
        total = total + tensors[0]
    return [[part] for part in total.split(batches)]


def _reduce_scatter():
    world = dist.get_world_size()
    for batches in sizes(world, BATCHES):
        inputs = [[torch.randn(sum(batches), 6)] for _ in range(world)]

        def simulate(whole, batches=batches):
            return _added(whole, batches)

        def run_v(own, batches=batches):
            return [comm_ops.reduce_scatter_v_pooled(own[0], list(batches)).wait()]

        def run_list(own, batches=batches):
            return [comm_ops.reduce_scatter_pooled(list(own[0].split(batches))).wait()]

        def run_base(own):
            return [comm_ops.reduce_scatter_base_pooled(own[0]).wait()]

        def run_per_feature(own, batches=batches):
            # Two features of the same batch, 4 and 2 columns.
            awaitable = comm_ops.reduce_scatter_v_per_feature_pooled(
                own[0], [[b, b] for b in batches], [4, 2]
            )
            return [awaitable.wait().view(-1, 6)]

        # NCCL reduces in an order of its own.
        atol = 1e-6 if rank_device().type == "cuda" else 0.0
        for run in (run_v, run_list, run_per_feature):
            check(inputs, simulate, run, forward_atol=atol)
        if len(set(batches)) == 1:
            check(inputs, simulate, run_base, forward_atol=atol)


def _all_gather():
    world = dist.get_world_size()
    for rows in (3, 0):
        inputs = [[torch.randn(rows, 4)] for _ in range(world)]

        def simulate(whole):
            return [[torch.cat([tensors[0] for tensors in whole])] for _ in range(world)]

        def run(own):
            return [comm_ops.all_gather_base_pooled(own[0]).wait()]

        check(inputs, simulate, run)


CASES = {
    "pooled": _pooled,
    "variable batch pooled": _variable_batch_pooled,
    "sequence": _sequence,
    "alltoallv": _alltoallv,
    "dense": _dense,
    "reduce-scatter": _reduce_scatter,
    "all-gather": _all_gather,
}


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_a_collective_equals_cat_and_split(case, world):
    run_on_ranks(world, CASES[case])


def _gradients(divide):
    comm_ops.set_gradient_division(divide)
    try:
        own = torch.ones(2, 3, device=rank_device(), requires_grad=True)
        comm_ops.alltoall_pooled(own, [1, 1], [3, 3]).wait().sum().backward()
        assert comm_ops.get_gradient_division() == divide
        return own.grad.cpu()
    finally:
        comm_ops.set_gradient_division(True)


@pytest.mark.multi_gpu
def test_gradients_are_divided_by_the_number_of_ranks_unless_told_otherwise():
    for gradient in run_on_ranks(2, _gradients, True):
        assert torch.equal(gradient, torch.full((2, 3), 0.5))
    for gradient in run_on_ranks(2, _gradients, False):
        assert torch.equal(gradient, torch.ones(2, 3))


def _one_rank_without_tables():
    rank, device = dist.get_rank(), rank_device()
    dims = [3, 0]
    own = torch.ones(2, dims[rank], device=device, requires_grad=rank == 0)
    output = comm_ops.alltoall_pooled(own, [1, 1], dims).wait()
    output.sum().backward()
    return None if own.grad is None else own.grad.cpu()


@pytest.mark.multi_gpu
def test_a_rank_whose_input_needs_no_gradient_still_sends_gradients_back():
    assert torch.equal(run_on_ranks(2, _one_rank_without_tables)[0], torch.full((2, 3), 0.5))


def _uneven_columns(dtype):
    """Gradients of 3 and 5 columns, whose layout on a GPU is made by FBGEMM's kernel."""
    rank, device, dims = dist.get_rank(), rank_device(), [3, 5]
    own = torch.ones(2, dims[rank], dtype=dtype, device=device).requires_grad_()
    there = [torch.tensor(numbers, device=device) for numbers in (dims, [0, *accumulate(dims)])]
    output = comm_ops.alltoall_pooled(own, [1, 1], dims, *there).wait()
    weights = torch.arange(8, dtype=dtype, device=device) + 8 * rank
    (output * weights).sum().backward()
    return own.grad


@pytest.mark.multi_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_of_uneven_columns_go_back_in_every_dtype(dtype):
    # Sample r has the weights of rank r; divided by two ranks.
    weights = torch.arange(16, dtype=dtype).view(2, 8) / 2
    first, second = run_on_ranks(2, _uneven_columns, dtype)
    assert torch.equal(first, weights[:, :3])
    assert torch.equal(second, weights[:, 3:])


def _several_at_once():
    """Started in one order, awaited in another; backwards autograd chooses."""
    device = rank_device()
    own = torch.arange(4.0, device=device).view(2, 2).requires_grad_()
    first = comm_ops.alltoall_pooled(own, [1, 1], [2, 2])
    second = comm_ops.reduce_scatter_base_pooled(own)
    third = comm_ops.all_gather_base_pooled(own)
    total = third.wait().sum() * 3 + first.wait().sum() + second.wait().sum() * 2
    total.backward()
    return own.grad.cpu()


@pytest.mark.multi_gpu
def test_collectives_may_be_awaited_in_another_order_than_started():
    # Each entry: (3 from each of 2 ranks + 1 + 2) / 2.
    for gradient in run_on_ranks(2, _several_at_once):
        assert torch.equal(gradient, torch.full((2, 2), 4.5))


def _half():
    own = torch.full((2, 2), 2049.0 if dist.get_rank() else 1.0, device=rank_device()).half()
    return comm_ops.reduce_scatter_v_pooled(own, [2, 0]).wait().cpu()


def test_16_bit_numbers_are_added_in_float32():
    # 2048 is what fp16 holds of 2049; 2048 + 1 rounds to 2048 whichever way, and the dtype stays.
    whole, nothing = run_on_ranks(2, _half)
    assert whole.dtype == nothing.dtype == torch.float16
    assert whole.tolist() == [[2048.0, 2048.0]] * 2
    assert nothing.shape == (0, 2)


def _without_gradients():
    with torch.no_grad():
        output = comm_ops.alltoall_pooled(torch.ones(2, 1, device=rank_device()), [1, 1], [1, 1])
        return output.wait().requires_grad


def test_nothing_is_recorded_without_gradients():
    assert run_on_ranks(2, _without_gradients) == [False, False]


def _refusals():
    with pytest.raises(ValueError, match="3 rows, which do not divide evenly among 2 ranks"):
        comm_ops.reduce_scatter_base_pooled(torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"add up to the input's 3 rows"):
        comm_ops.reduce_scatter_v_pooled(torch.ones(3, 1), [1, 1])
    with pytest.raises(ValueError, match="give out_split or per_rank_split_lengths"):
        comm_ops.alltoallv([torch.ones(2, 1)])
    with pytest.raises(ValueError, match="inputs is empty"):
        comm_ops.alltoallv([])
    order = torch.arange(2)
    with pytest.raises(ValueError, match="give the ids of each of the 2 segments"):
        comm_ops.alltoall_sequence(
            torch.ones(1, 1), order, order, torch.ones(1), [1, 0], [1, 0], True
        )


def test_wrong_sizes_are_refused_with_the_remedy():
    run_on_ranks(2, _refusals)


def _alone():
    own = torch.ones(2, 3)
    return isinstance(comm_ops.alltoall_pooled(own, [2], [3]), NoWait)


def test_one_rank_sends_nothing():
    assert run_on_ranks(1, _alone) == [True]


def test_a_group_is_needed():
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialized"):
        comm_ops.alltoall_pooled(torch.ones(1, 1), [1], [1])
