"""Packaging a mapped checkpoint leaves little of it in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

PROGRAM = """
import threading, time
from pathlib import Path
import torch
from tessera.serving.packaging.tables import spill
from tessera.serving.packaging.tables.quantize import FloatTable, quantize_tables
from tessera.serving.packaging.tables.spill import Spill
from tessera.kernels.row_types import row_type
import sys

spill.SPILLED_FROM_BYTES = 1
folder, rows = Path(sys.argv[1]), 1 << 17

def resident():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssFile:")[1].split()[0]) << 10

weights = torch.load(folder / "tables.pt", mmap=True, weights_only=True)
tables = [FloatTable(name=name, weights=value) for name, value in weights.items()]
# Once, so that code that is mapped on its first use does not count.
quantize_tables([FloatTable(name="x", weights=torch.ones(4, 64))], row_type("int8"))
before = highest = resident()

def look(_):
    global highest
    highest = max(highest, resident())

stored = quantize_tables(tables, row_type("int8"), allocate=Spill(folder).zeros, on_rows=look)
print(highest - before, resident() - before, len(stored.buffers[0]))
"""


def test_of_tables_and_result_little_is_resident(tmp_path: Path) -> None:
    rows, dim, count = 1 << 17, 64, 3
    table_bytes = rows * dim * 4  # 32 MiB
    torch.save(
        {f"t{number}": torch.rand(rows, dim) for number in range(count)}, tmp_path / "tables.pt"
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True
    )
    highest, after, stored_bytes = map(int, done.stdout.split())
    assert stored_bytes == rows * (dim + 4) * count
    # At most one table's quantized rows and a few chunks of 4 MiB: less than one table.
    assert highest < table_bytes
    assert after < table_bytes // 2
