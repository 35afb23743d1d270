"""Rows of ids in a hash-based map by our operators, held against operations of whole tensors on the CPU."""

from dataclasses import replace

import pytest
import torch

from tessera.training.modules.hash_learning import StepsInTensors
from tessera.training.modules.hash_places import (
    NO_ID,
    NO_ROW,
    Hours,
    Layout,
    TrainInputMapper,
    find,
    learn,
)

ROWS, BUCKETS, NOW, STEPS = 60, 3, 50, 4


def layout_of(
    *, rows=ROWS, buckets=BUCKETS, first_row=0, reserved=0, probes=7, device="cpu", **mapper
):
    """The buckets of a table of which those from ``first_row`` on are here, with ``rows`` rows."""
    size = rows // buckets
    bounds = torch.arange(0, first_row + rows, size)
    mapper = {"input_hash_size": 0, "inference_dispatch_div_train_world_size": False, **mapper}
    sizes = torch.full_like(bounds, size)
    mapping = TrainInputMapper(
        total_num_buckets=len(bounds), size_per_rank=sizes, train_rank_offsets=bounds, **mapper
    )
    return Layout(mapping.to(device), first_row, reserved, probes)


def batch(generator, layout, count=40):
    """Ids of the buckets that are here, some of them several times and some `NO_ID`."""
    ids = torch.randint(-150, 150, (count,), generator=generator) * 7
    ids[torch.rand(count, generator=generator) < 0.1] = NO_ID
    _, buckets = layout.of_ids(ids)
    return ids[buckets.firsts >= 0]


def hours_of(ids, generator, policy, last, now):
    if policy == "none":
        return None
    given = torch.randint(now, now + 3, ids.shape, generator=generator, dtype=torch.int32)
    return Hours(last, given, now, oldest=policy == "oldest")


def in_tensors(table, ids, layout, hours, let_in=None):
    """The rows and the rows that were another id's, of the whole table, on the CPU."""
    own, buckets = layout.of_ids(ids)
    placed = StepsInTensors().learn(table, ids, own, buckets, hours=hours, let_in=let_in)
    return placed.rows + layout.first_row, placed.evicted + layout.first_row


def moved(hours, last, device):
    return hours and replace(hours, last=last, given=hours.given.to(device))


def tables(rows=ROWS):
    return torch.full((rows, 1), NO_ID), torch.full((rows, 1), -1, dtype=torch.int32)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "mapper",
    [
        {},
        {"input_hash_size": 2200},
        {"inference_dispatch_div_train_world_size": True},
        {"input_hash_size": 2200, "inference_dispatch_div_train_world_size": True},
        {"first_row": 40},
    ],
    ids=["remainders", "ranges", "quotients", "places", "of a rank"],
)
@pytest.mark.parametrize("reserved", [0, 4])
@pytest.mark.parametrize("probes", [1, 5, 20])
@pytest.mark.parametrize("policy", ["none", "first", "oldest"])
def test_steps_give_the_rows_of_whole_tensors(policy, probes, reserved, mapper, seed, device):  # noqa: PLR0917 - what a step depends on
    generator = torch.Generator().manual_seed(seed)
    more = {"reserved": reserved, "probes": probes, **mapper}
    ours, theirs = layout_of(device=device, **more), layout_of(**more)
    expected_table, expected_last = tables()
    table, last = (t.to(device, copy=True) for t in (expected_table, expected_last))
    changed = 0
    for step in range(STEPS):
        ids = batch(generator, theirs)
        if "input_hash_size" in mapper:
            ids = ids.remainder(2200)
        let_in = torch.rand(len(ids), generator=generator) < 0.6 if seed == 2 else None
        hours = hours_of(ids, generator, policy, expected_last, NOW + 2 * step)
        rows, before = in_tensors(expected_table, ids, theirs, hours, let_in)
        on_device = None if let_in is None else let_in.to(device)
        found, evicted = learn(table, ids.to(device), ours, moved(hours, last, device), on_device)
        assert torch.equal(found.cpu(), rows)
        assert torch.equal(evicted[evicted != NO_ROW].cpu(), before)
        assert torch.equal(table.cpu(), expected_table)
        assert torch.equal(last.cpu(), expected_last)
        assert torch.equal(find(table, ids.to(device), ours).cpu(), rows)
        changed += before.numel()
    assert changed == 0 if policy == "none" else changed > 0 or theirs.first_row
    assert (expected_table != NO_ID).sum() > 5


@pytest.mark.parametrize("policy", ["none", "first", "oldest"])
def test_more_ids_than_rows_claim_the_same_rows(policy, device):
    generator = torch.Generator().manual_seed(5)
    more = {"rows": 6000, "probes": 64}
    expected_table, expected_last = tables(6000)
    table, last = (t.to(device, copy=True) for t in (expected_table, expected_last))
    for step in range(3):
        ids = torch.randint(90_000, (9000,), generator=generator)
        hours = hours_of(ids, generator, policy, expected_last, NOW + 2 * step)
        rows, before = in_tensors(expected_table, ids, layout_of(**more), hours)
        ours = layout_of(device=device, **more)
        found, evicted = learn(table, ids.to(device), ours, moved(hours, last, device))
        assert torch.equal(found.cpu(), rows)
        assert torch.equal(evicted[evicted != NO_ROW].cpu(), before)
        assert torch.equal(table.cpu(), expected_table)
    assert (expected_table[rows, 0] != ids).any()


def test_one_hour_is_that_of_all_ids(device):
    layout = layout_of(device=device)
    ids = torch.tensor([5, 8, 5, 11], device=device)
    results = []
    for given in (53, torch.full((4,), 53, dtype=torch.int32, device=device)):
        table, last = (tensor.to(device) for tensor in tables())
        rows, _ = learn(table, ids, layout, Hours(last, given, NOW))
        assert (last == 53).sum() == 3
        results.append((rows.tolist(), last.tolist()))
    assert results[0] == results[1]


def test_an_id_that_comes_again_has_its_row_and_its_latest_hour(device):
    ids = torch.tensor([5, 8, 5, 11, 5, 8], device=device)
    hours = torch.tensor([51, 52, 59, 53, 54, 50], dtype=torch.int32, device=device)
    table, last = (tensor.to(device) for tensor in tables())
    rows, _ = learn(table, ids, layout_of(device=device), Hours(last, hours, NOW))
    assert rows[0] == rows[2] == rows[4]
    assert rows[1] == rows[5]
    assert last[rows[[0, 1, 3]], 0].tolist() == [59, 52, 53]
    again = torch.full_like(hours, 55)
    learn(table, ids, layout_of(device=device), Hours(last, again, NOW))
    assert last[rows[[0, 1, 3]], 0].tolist() == [59, 55, 55]


def test_ids_that_the_table_has_alike_are_one_id(device):
    layout = layout_of(
        device=device, input_hash_size=30, inference_dispatch_div_train_world_size=True
    )
    table = tables()[0].to(device)
    rows, _ = learn(table, torch.tensor([4, 34, 14, 4], device=device), layout)
    assert rows[0] == rows[1] == rows[3]
    assert table[rows[[0, 2]], 0].tolist() == [4, 4]  # in two buckets
    assert (table != NO_ID).sum() == 2


def test_no_ids_change_nothing(device):
    table = tables()[0].to(device)
    nothing = torch.arange(0, device=device)
    rows, evicted = learn(table, nothing, layout_of(device=device))
    assert rows.tolist() == evicted.tolist() == []
    assert find(table, nothing, layout_of(device=device)).tolist() == []
    assert (table == NO_ID).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"first_row": 4}, "the bucket of entry 1 has no rows for ids among those from 4 to 11"),
        ({"reserved": 4}, "of which 4 of a bucket are reserved"),
        ({"sizes": torch.tensor([4, 9])}, "the bucket of entry 0"),
        ({"firsts": torch.tensor([0])}, "firsts: 2 contiguous values"),
        ({"sizes": torch.arange(0), "firsts": torch.arange(0)}, "sizes: those of at least 1"),
        ({"range": -1}, "range: at least 0"),
        ({"reserved": -1}, "reserved: at least 0"),
        ({"probes": 0}, "probes: at least 1"),
        ({"hours": torch.zeros(2, dtype=torch.int32)}, "last_hours is needed as well"),
        ({"last_hours": torch.zeros(8, 1)}, "last_hours: 8 contiguous"),
        (
            {"hours": torch.zeros(2), "last_hours": torch.zeros(8, dtype=torch.int32)},
            "hours: 2 contiguous",
        ),
        ({"hour": -1}, "hour: 0 to"),
        ({"let_in": torch.ones(3, dtype=torch.bool)}, "let_in: 2 contiguous"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, said):
    given = {
        "identities": torch.full((8, 1), NO_ID),
        "ids": torch.tensor([7, 10]),
        "sizes": torch.tensor([4, 4]),
        "firsts": torch.tensor([0, 4]),
        "first_row": 0,
        "range": 0,
        "divides": False,
        "reserved": 0,
        "probes": 4,
    }
    with pytest.raises(RuntimeError, match=said):
        torch.ops.tessera.learn_ids(**{**given, **change})
    assert (given["identities"] == NO_ID).all()


@pytest.mark.gpu
def test_a_bucket_that_is_not_here_has_no_rows_on_a_gpu():
    table = torch.full((20, 1), NO_ID, device="cuda")
    layout = layout_of(rows=20, buckets=1, first_row=20, device="cuda")
    ids = torch.tensor([7, 9, 10, 11], device="cuda")
    rows, _ = learn(table, ids, layout)
    assert [row >= 20 for row in rows.tolist()] == [True, True, False, True]
    assert rows[2] == find(table, ids, layout)[2] == NO_ROW
    assert (table >= 0).sum() == 3


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for():
    layout = layout_of(device="cuda")
    table, last = (tensor.cuda() for tensor in tables())
    ids = torch.tensor([7, 9, 10, 7], device="cuda")
    learn(table, ids, layout, Hours(last, 53, NOW))
    torch.cuda.set_sync_debug_mode("error")
    try:
        learn(table, ids + 3, layout, Hours(last, 53, NOW))
        find(table, ids, layout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (table != NO_ID).sum() == 5
