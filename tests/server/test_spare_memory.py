"""Memory of tables that nobody uses any more is the next tables', and the system's meanwhile and afterwards."""

import time
from pathlib import Path

from tessera.serving.package.table_memory import TableMemory
from tessera.serving.server.repository.spare_memory import SpareMemory


def lazily_free():
    """Bytes that the system may take whenever it wants, and nobody uses."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("LazyFree:"))


def wait_until(holds):
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def filled(memory, size):
    table = memory.new(size)
    table.fill_(7)
    return table


def test_memory_that_nobody_uses_is_the_next_tables_of_its_size_and_the_systems_meanwhile():
    memory, size = TableMemory(SpareMemory(60)), (16 << 20) + 5
    before = lazily_free()
    table = filled(memory, size)
    address = table.data_ptr()
    assert lazily_free() - before < size / 8
    del table
    assert lazily_free() - before > size * 7 / 8
    second, third = filled(memory, size), filled(memory, size)
    assert second.data_ptr() == address
    assert third.data_ptr() != address
    assert lazily_free() - before < size / 8


def test_memory_that_nobody_has_taken_goes_back_after_a_while():
    memory, size = TableMemory(SpareMemory(0.5)), 32 << 20
    before = lazily_free()
    for _ in range(2):  # the second time the thread that gives it back has ended, or goes on
        filled(memory, size)
        assert lazily_free() - before > size * 7 / 8
        wait_until(lambda: lazily_free() - before < size / 8)


def test_what_is_kept_never_adds_to_what_is_in_use():
    memory, mib = TableMemory(SpareMemory(60)), 1 << 20
    before = lazily_free()
    tables = [filled(memory, 12 * mib), filled(memory, 10 * mib)]
    tables.clear()
    assert lazily_free() - before > 20 * mib
    others = [filled(memory, 8 * mib)]
    assert lazily_free() - before < 13 * mib  # one of the two has gone
    others.append(filled(memory, 20 * mib))
    assert lazily_free() - before < mib
