"""Rows of new ids by our operator, held against the same in operations of whole tensors on the CPU."""

from dataclasses import replace

import pytest
import torch

from tessera.training.modules.hash_places import NO_ID, Buckets, Expiry, place, place_at_once

ROWS, BUCKETS, NOW = 60, 3, 50


def call(ids, *, reserved=0, probes=7, policy="none", seed=0, rows=ROWS, device="cpu"):
    """A table that is half full, the buckets of ids in it, and hours around that of now or None."""
    generator = torch.Generator().manual_seed(seed)
    identities = torch.arange(100_000, 100_000 + rows)
    identities[torch.rand(rows, generator=generator) < 0.5] = NO_ID
    hours = torch.randint(NOW - 5, NOW + 5, (rows,), generator=generator, dtype=torch.int32)
    sizes = torch.full_like(ids, rows // BUCKETS)
    buckets = Buckets(sizes.to(device), (ids % BUCKETS * sizes).to(device), reserved, probes)
    of_ids = torch.randint(NOW, NOW + 3, ids.shape, generator=generator, dtype=torch.int32)
    expiry = Expiry(hours[:, None].to(device), of_ids.to(device), NOW, oldest=policy == "oldest")
    return identities[:, None].to(device), buckets, None if policy == "none" else expiry


def results(place_ids, ids, device, **shape):
    """The rows, those that were another id's, and the table after it, on the CPU."""
    table, buckets, expiry = call(ids, device=device, **shape)
    placed = place_ids(table, ids.to(device), buckets, expiry)
    found = (placed.rows, placed.evicted, table, table if expiry is None else expiry.last_hours)
    return [tensor.cpu() for tensor in found]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("reserved", [0, 4])
@pytest.mark.parametrize("probes", [1, 5, 128])
@pytest.mark.parametrize("policy", ["none", "first", "oldest"])
def test_the_operator_and_whole_tensors_give_the_same(policy, probes, reserved, seed, device):
    ids = torch.randperm(500, generator=torch.Generator().manual_seed(seed))[:40] - 100
    ids = ids[ids != NO_ID]
    shape = {"reserved": reserved, "probes": probes, "policy": policy, "seed": seed}
    found = results(place, ids, device, **shape)
    expected = results(place_at_once, ids, "cpu", **shape)
    for ours, at_once in zip(found, expected, strict=True):
        assert torch.equal(ours, at_once)
    assert (found[0] >= 0).any()
    assert (found[1].numel() > 0) == (policy != "none")


@pytest.mark.parametrize("policy", ["none", "first", "oldest"])
def test_more_ids_than_rows_claim_the_same_rows(policy, device):
    ids = torch.randperm(90_000, generator=torch.Generator().manual_seed(5))[:9000]
    shape = {"probes": 64, "policy": policy, "rows": 6000}
    found = results(place, ids, device, **shape)
    expected = results(place_at_once, ids, "cpu", **shape)
    for ours, at_once in zip(found, expected, strict=True):
        assert torch.equal(ours, at_once)
    assert (found[0] < 0).any()


def test_an_id_that_comes_again_has_its_row_and_its_latest_hour(device):
    ids = torch.tensor([5, 8, 5, 11, 5, 8])
    table, buckets, expiry = call(ids, policy="first", device=device)
    hours = torch.tensor([51, 52, 59, 53, 54, 50], dtype=torch.int32, device=device)
    rows = place(table, ids.to(device), buckets, replace(expiry, hours=hours)).rows
    first = torch.tensor([0, 1, 3])
    alone, alone_buckets, alone_expiry = call(ids[first], policy="first")
    latest = replace(alone_expiry, hours=torch.tensor([59, 52, 53], dtype=torch.int32))
    expected = place_at_once(alone, ids[first], alone_buckets, latest).rows
    assert rows.tolist() == expected[[0, 1, 0, 2, 0, 1]].tolist()
    assert torch.equal(table.cpu(), alone)
    assert torch.equal(expiry.last_hours.cpu(), alone_expiry.last_hours)


def test_an_id_of_another_bucket_is_another_id(device):
    table, ids = torch.full((8, 1), NO_ID, device=device), torch.tensor([7, 7], device=device)
    sizes, firsts = torch.tensor([4, 4], device=device), torch.tensor([0, 4], device=device)
    rows = place(table, ids, Buckets(sizes, firsts, 0, 4)).rows
    assert rows[1] == rows[0] + 4
    assert (table == 7).sum() == 2


def test_no_ids_change_nothing(device):
    table, buckets, _ = call(torch.arange(0), device=device)
    before = table.clone()
    assert place(table, torch.arange(0, device=device), buckets).rows.tolist() == []
    assert torch.equal(table, before)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sizes": torch.tensor([4, 9])}, "entry 1 has 9 rows from 0 on"),
        ({"firsts": torch.tensor([0, -1])}, "entry 1 has 4 rows from -1 on"),
        ({"firsts": torch.tensor([5, 0])}, "entry 0 has 4 rows from 5 on"),
        ({"firsts": torch.tensor([0])}, "firsts: 2 contiguous values"),
        ({"reserved": 4}, "4 of them reserved"),
        ({"reserved": -1}, "reserved: at least 0"),
        ({"probes": 0}, "probes: at least 1"),
        ({"last_hours": torch.zeros(8, 1, dtype=torch.int32)}, "both or neither"),
        ({"hours": torch.zeros(2), "last_hours": torch.zeros(8, 1)}, "last_hours: 8 contiguous"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, said):
    given = {
        "identities": torch.full((8, 1), NO_ID),
        "ids": torch.tensor([7, 9]),
        "sizes": torch.tensor([4, 4]),
        "firsts": torch.tensor([0, 0]),
        "reserved": 0,
        "probes": 4,
    }
    with pytest.raises(RuntimeError, match=said):
        torch.ops.tessera.place_ids(**{**given, **change})
    assert (given["identities"] == NO_ID).all()


@pytest.mark.gpu
def test_a_bucket_outside_of_the_table_has_no_rows_on_a_gpu():
    table = torch.full((8, 1), NO_ID, device="cuda")
    ids, sizes = (torch.tensor(n, device="cuda") for n in ([7, 9, 11], [4, 4, 9]))
    firsts = torch.tensor([0, 5, 0], device="cuda")
    rows = place(table, ids, Buckets(sizes, firsts, 0, 4)).rows
    assert [row >= 0 for row in rows.tolist()] == [True, False, False]
    assert (table >= 0).sum() == 1
