"""Memory of tables that nobody uses any more is found again, or the next tables', and the system's meanwhile and afterwards."""

import ctypes
import mmap
import time
from pathlib import Path

import pytest
import torch

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


FILE, HASHES = (1, 2, 3), ("aa", "bb")
PAGE = 4096


@pytest.fixture
def kept():
    """A store, and what it has of a table that nobody uses any more: its address and its content."""
    memory = TableMemory(SpareMemory(60))
    # A huge page that it shares with a neighbour may stay in use as a whole.
    table = memory.new((33 << 20) + 3 * PAGE + 3)
    three_pages = torch.arange(3 * PAGE) % 251
    three_pages[PAGE : 2 * PAGE] = 0  # a page of zeros alone
    three_pages[2 * PAGE : 2 * PAGE + 4000] = 0
    table.copy_(three_pages.repeat(-(-table.numel() // len(three_pages)))[: table.numel()])
    memory.tell(HASHES, table, FILE)
    return memory, table.data_ptr(), table.clone()


def take_page(address, number):
    """As the kernel does where it needs memory."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.madvise(address + number * PAGE, PAGE, mmap.MADV_DONTNEED) == 0


def test_a_table_that_was_kept_is_found_again_as_it_was(kept):
    memory, address, content = kept
    for _ in range(3):
        assert memory.find(("aa",), FILE) is None
        before = lazily_free()
        table = memory.find(HASHES, FILE)
        assert table is not None
        assert table.data_ptr() == address
        assert torch.equal(table, content)
        assert before - lazily_free() > content.numel() * 7 / 8  # in use again
        assert memory.find(HASHES, (7,)).data_ptr() == address  # somebody uses it
        del table


def test_a_kept_table_is_not_found_for_a_file_that_was_written_to(kept):
    memory, _, _ = kept
    assert memory.find(HASHES, (1, 2, 4)) is None
    assert memory.find(HASHES, FILE) is not None


@pytest.mark.parametrize("page", [0, 2, 8451])
def test_a_kept_table_is_not_found_where_the_system_has_taken_a_page(kept, page):
    memory, address, content = kept
    take_page(address, page)
    assert memory.find(HASHES, FILE) is None
    assert memory.find(HASHES, FILE) is None
    assert memory.new(content.numel()).data_ptr() == address  # its memory is kept all the same


def test_a_kept_table_is_found_where_a_page_that_was_taken_had_zeros_alone(kept):
    memory, address, content = kept
    take_page(address, 1)
    take_page(address, 4)
    assert torch.equal(memory.find(HASHES, FILE), content)


def test_a_kept_table_is_not_found_once_its_memory_is_another_tables(kept):
    memory, address, content = kept
    table = memory.new(content.numel())
    assert table.data_ptr() == address
    assert memory.find(HASHES, FILE) is None
    del table
    assert memory.find(HASHES, FILE) is None  # what was not compared is not known afterwards


def test_a_kept_table_is_whole_or_not_found_where_the_kernel_is_to_take_it(kept):
    memory, address, content = kept
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    pageout = 21  # MADV_PAGEOUT of <asm-generic/mman-common.h>; older kernels decline
    libc.madvise(address, content.numel() // PAGE * PAGE, pageout)
    table = memory.find(HASHES, FILE)
    assert table is None or torch.equal(table, content)
