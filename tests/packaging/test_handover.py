"""Large tables in memory of their own, handed from one process to another, and shared where they are equal."""

import hashlib
import os
from pathlib import Path

import pytest
import torch

from tessera.serving.package.handover import CheckedContents, SharedContents
from tessera.serving.package.loading import Loading, load_package
from tessera.serving.package.opening import LARGE_BYTES
from tessera.serving.package.records import PackageError
from tessera.serving.package.runner import zero_batch
from tessera.serving.package.table_memory import TableMemory
from tessera.training.models.config import TableConfig
from tests.package_factory import make_package


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    features = {"user": TableConfig(rows=40_000), "item": TableConfig(rows=30)}
    path, _ = make_package(tmp_path_factory.mktemp("package"), features=features, dim=64)
    return path


FILE = (1, 2, 3)


def mapped(address):
    """Whether this process has memory at ``address``."""
    with Path("/proc/self/maps").open(encoding="ascii") as lines:
        ranges = [line.split()[0].split("-") for line in lines]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def test_a_table_goes_back_to_the_system_with_its_last_user():
    memory = TableMemory()
    table = memory.new((64 << 20) + 1)
    table[-1] = 7
    address = table.data_ptr()
    memory.tell(("a hash",), table, FILE)
    shared = memory.find(("a hash",), FILE)
    assert shared.data_ptr() == address
    assert memory.find(("another",), FILE) is None
    del table
    assert int(shared[-1]) == 7
    assert mapped(address)
    del shared
    assert not mapped(address)
    assert memory.find(("a hash",), FILE) is None


def checked(package):
    """What a process that has checked ``package`` hands over."""
    loading = Loading(package)
    large = [entry.bytes for entry in loading.records.entries if entry.bytes >= LARGE_BYTES]
    assert large
    contents = SharedContents(sum(map(SharedContents.room, large)))
    loading = Loading(package, memory=contents)
    told = []
    loading.read(told.append)
    listed = loading.manifest.records
    assert sum(told) == sum(info.bytes for info in listed.values())
    return CheckedContents(
        descriptor=contents.descriptor,
        offsets=dict(zip(loading.opening.large_tables(), contents.offsets, strict=True)),
        manifest_sha256=hashlib.sha256(loading.records.manifest_bytes()).hexdigest(),
    )


def runner_of(loading):
    loading.build()
    loading.settle(verify_golden=True)
    return loading.package(loading.hash_again(), 0.0).runner


def test_what_was_checked_elsewhere_answers_as_the_package_does(package):
    contents = checked(package)
    loading = Loading(package)
    contents.take(loading.records, loading.opening)
    found = runner_of(loading)
    expected = load_package(package).runner
    batch = zero_batch(loading.manifest.schema, 5, wide_ids=True)
    assert torch.equal(found.forward(batch)["default"], expected.forward(batch)["default"])
    # Each piece was given back when it had been taken.
    assert os.fstat(contents.descriptor).st_blocks == 0
    os.close(contents.descriptor)


def test_a_file_that_was_replaced_since_it_was_checked_is_refused(package, tmp_path):
    contents = checked(package)
    other, _ = make_package(tmp_path, seed=9, features={"user": TableConfig(rows=40_000)}, dim=64)
    loading = Loading(other)
    with pytest.raises(PackageError, match="was changed while it was being loaded"):
        contents.take(loading.records, loading.opening)
    os.close(contents.descriptor)


def test_equal_tables_are_there_once(package):
    memory = TableMemory()
    runners, addresses = [], []
    for _ in range(2):
        contents = checked(package)
        loading = Loading(package, memory=memory)
        contents.take(loading.records, loading.opening)
        loading.opening.offer()
        hashes = loading.manifest.records[loading.opening.large_tables()[0]].compared()
        addresses.append(memory.find(hashes, FILE).data_ptr())
        runners.append(runner_of(loading))
        os.close(contents.descriptor)
        del loading
    assert addresses[0] == addresses[1]
    batch = zero_batch(load_package(package).manifest.schema, 3, wide_ids=False)
    first, second = (runner.forward(batch)["default"] for runner in runners)
    assert torch.equal(first, second)
    del runners
    assert not mapped(addresses[0])
