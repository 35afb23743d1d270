"""Where ranks stand, and work that one rank does for all."""

import pytest
import torch
import torch.distributed as dist

from tessera.training.distributed.collective_utils import (
    invoke_on_rank_and_broadcast_result,
    is_leader,
    run_on_leader,
)
from tessera.training.distributed.comm import nodes as comm
from tests.training.ranks import RankError, rank_device, run_on_ranks


@pytest.mark.parametrize(
    ("environment", "local_size"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "3"}, 8),  # does not divide 8
        ({"LOCAL_WORLD_SIZE": "0"}, 8),
        ({"LOCAL_WORLD_SIZE": "-1"}, 8),
        ({}, 8),
    ],
)
def test_ranks_per_node(monkeypatch, environment, local_size):
    for variable in (*comm._LOCAL_SIZE_VARIABLES, *comm._LOCAL_RANK_VARIABLES):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert comm.get_local_size(8) == local_size
    assert comm.get_num_groups(8) == 8 // local_size
    assert comm.get_group_rank(8, 5) == 5 // local_size
    assert comm.get_local_rank(8, 5) == 5 % local_size
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert comm.get_local_rank(8, 5) == 1
    monkeypatch.setenv("LOCAL_RANK", "9")  # not on a node of this size
    assert comm.get_local_rank(8, 5) == 5 % local_size


def _groups():
    intra, cross = comm.intra_and_cross_node_pg(rank_device())
    again = comm.intra_and_cross_node_pg(rank_device())
    assert again == (intra, cross)
    rank, device = dist.get_rank(), rank_device()
    sums = []
    for group in (intra, cross):
        total = torch.tensor([2**rank], device=device)
        dist.all_reduce(total, group=group)
        sums.append(total.item())
    assert comm.get_group_rank() == rank // 2
    assert comm.get_num_groups() == 2
    return sums


@pytest.mark.multi_gpu
def test_two_nodes_of_two_ranks():
    sums = run_on_ranks(4, _groups, local_world_size=2)
    # Which ranks are in a group is written in the bits: nodes are 0b0011 and 0b1100.
    assert sums == [[0b0011, 0b0101], [0b0011, 0b1010], [0b1100, 0b0101], [0b1100, 0b1010]]


def _one_node():
    intra, cross = comm.intra_and_cross_node_pg()
    return intra.size(), cross.size()


def test_one_node():
    assert run_on_ranks(2, _one_node) == [(2, 1)] * 2


def test_nothing_travels_on_the_meta_device():
    assert comm.intra_and_cross_node_pg(torch.device("meta")) == (None, None)


def _invoke(failing):
    calls = []

    def work(value, *, factor):
        calls.append(value)
        if failing:
            raise LookupError("not here")
        return {"answer": value * factor}

    result = invoke_on_rank_and_broadcast_result(dist.group.WORLD, 1, work, 21, factor=2)
    return result, calls


def test_one_rank_works_and_all_get_the_result():
    assert run_on_ranks(2, _invoke, False) == [({"answer": 42}, []), ({"answer": 42}, [21])]


def test_a_failure_reaches_all():
    with pytest.raises(RankError) as caught:
        run_on_ranks(2, _invoke, True)
    text = str(caught.value)
    assert "RuntimeError: rank 1 failed in" in text
    assert "with LookupError: not here" in text
    assert text.count("raise LookupError") == 1
    # Both ranks are still in step.
    assert run_on_ranks(2, _invoke, False)[0][0] == {"answer": 42}


def _decorated():
    @run_on_leader(dist.group.WORLD, 0)
    def who():
        return dist.get_rank()

    return who(), is_leader(dist.group.WORLD), is_leader(dist.group.WORLD, 1), who.__name__


def test_the_leader():
    assert run_on_ranks(2, _decorated) == [(0, True, False, "who"), (0, False, True, "who")]
    assert is_leader(None)
    assert not is_leader(None, 1)
