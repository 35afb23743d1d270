"""Asking for huge pages never changes what memory holds."""

from __future__ import annotations

import torch

from tessera.kernels.memory import use_huge_pages


def test_what_the_table_holds_stays():
    table = torch.randint(0, 256, (9 << 20,), dtype=torch.uint8)
    before = table.clone()
    share = use_huge_pages(table)
    assert 0.0 <= share <= 1.0
    assert torch.equal(table, before)


def test_nothing_is_asked_for_a_small_or_strided_table():
    assert use_huge_pages(torch.zeros(4096, dtype=torch.uint8)) == 0.0
    assert use_huge_pages(torch.zeros(9 << 20, dtype=torch.uint8)[::2]) == 0.0
