"""Asking for huge pages never changes what memory holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
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


PROGRAM = """
import torch
from tessera.kernels import ops
from tessera.kernels.quantize import quantize_table
from tessera.kernels.row_types import FLOAT32
from tessera.kernels.tables import FeatureLookup, make_plan, pack_tables
ops.load()
values = torch.arange(80_000.0)[:, None] + torch.arange(128.0) / 128
packed = pack_tables([quantize_table(values, FLOAT32)])  # 41 MB
plan = make_plan([FeatureLookup(table=packed.places[0], out_column=0)])
ids = torch.arange(0, 80_000, 97)
for _ in range(2):
    ours = torch.ops.tessera.lookup(packed.weights, plan, ids, torch.ones_like(ids), 128)
    assert torch.equal(ours, values[ids])
kind = [line for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")]
print(kind[0].split()[1])
"""


def huge_kibibytes(asked):
    """Run the program, which checks what it looks up; how much memory ended in huge pages."""
    environment = os.environ | {"TESSERA_HUGE_PAGES": asked, "OMP_NUM_THREADS": "1"}
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    return int(program.stdout)


SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
BY_REQUEST = SETTING.is_file() and "[madvise]" in SETTING.read_text()


@pytest.mark.skipif(not BY_REQUEST, reason="this system gives huge pages unasked, or never")
def test_operators_ask_for_huge_pages_unless_told_not_to():
    # How much the system can give is its affair: values must hold in any case.
    huge_kibibytes("1")
    assert huge_kibibytes("0") == 0
