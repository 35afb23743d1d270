"""The harness itself: every rank runs, errors come back with their rank, a hang ends."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tessera.training.distributed.comm import intra_and_cross_node_pg
from tests.training.ranks import RankError, rank_device, run_on_ranks, uses_cuda


def _sum_of_ranks(start):
    total = torch.tensor([start + dist.get_rank()], device=rank_device())
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def _fail_on(ranks):
    if dist.get_rank() in ranks:
        raise LookupError("told to fail")
    dist.barrier()


def _wait_for_nobody():
    if dist.get_rank() == 0:
        ones = torch.ones(1, device=rank_device())
        dist.all_reduce(ones)
        ones.item()  # with NCCL it is here that the host waits


def _local_world_size():
    return int(os.environ["LOCAL_WORLD_SIZE"])


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_runs_and_answers_in_order(world_size):
    total = sum(range(world_size)) + 10 * world_size
    assert run_on_ranks(world_size, _sum_of_ranks, 10) == [(r, total) for r in range(world_size)]


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_an_error_comes_back_with_its_rank_and_the_next_call_works(ranks):
    with pytest.raises(RankError, match=f"rank {ranks[0]}: (.|\n)*LookupError: told to fail"):
        run_on_ranks(2, _fail_on, ranks)
    assert run_on_ranks(2, _sum_of_ranks, 0) == [(0, 1), (1, 1)]


def test_a_hang_ends():
    with pytest.raises(RankError, match=r"ranks \[0\] did not answer"):
        run_on_ranks(2, _wait_for_nobody, timeout_s=4.0)


def test_nodes_are_as_large_as_asked_for():
    assert run_on_ranks(2, _local_world_size, local_world_size=1) == [1, 1]
    assert run_on_ranks(2, _local_world_size) == [2, 2]


def _make_groups(count):
    """Groups of all ranks, each used, and the cached ones of the nodes."""
    for _ in range(count):
        dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
    intra_and_cross_node_pg()


def _loops_of_gloo():
    """How many threads here wait for what groups receive; each group has one."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop")


@pytest.mark.skipif(uses_cuda(), reason="the groups of NCCL stay")
def test_groups_that_a_call_made_end_with_it():
    run_on_ranks(2, _make_groups, 5)
    assert run_on_ranks(2, _loops_of_gloo) == [1, 1]
    # The node groups, which are cached, are made anew.
    run_on_ranks(2, _make_groups, 1)
