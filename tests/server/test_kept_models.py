"""Models of versions that nobody uses any more come back as they were, and their tables are the system's meanwhile."""

import ctypes
import os
import time
from types import SimpleNamespace

import pytest
import torch

from tessera.serving.package.table_memory import TableMemory
from tessera.serving.server.config import ServerConfig
from tessera.serving.server.model.loader import ModelOrigin
from tessera.serving.server.repository import version_loader
from tessera.serving.server.repository.kept_models import MOST_MODELS, KeptModels
from tessera.serving.server.repository.spare_memory import SpareMemory
from tessera.serving.server.repository.version_loader import PackageVersionLoader
from tessera.training.models.config import TableConfig
from tests.package_factory import make_package
from tests.server.test_spare_memory import lazily_free, take_page, wait_until

FILE, OTHER_FILE = (1, 2, 3), (1, 2, 4)
MIB = 1 << 20
SIZES = (33 * MIB + 5, 20 * MIB)


def new_model(memory, file=FILE, sizes=SIZES):
    """A model, and a copy of what its tables have."""
    tables = [memory.new(size) for size in sizes]
    for number, table in enumerate(tables):
        table.copy_((torch.arange(table.numel()) + number) % 251)
        memory.tell((str(file), str(number)), table, file)
    copies = [table.clone() for table in tables]
    return SimpleNamespace(origin=ModelOrigin(file=file, tables=tuple(tables))), copies


@pytest.fixture
def memory():
    return TableMemory(SpareMemory(60))


def test_a_model_that_was_kept_has_what_its_tables_had_and_the_system_has_them_meanwhile(memory):
    kept, before = KeptModels(memory, 60), lazily_free()
    model, copies = new_model(memory)
    for _ in range(3):
        kept.keep(model)
        assert lazily_free() - before > sum(SIZES) * 7 / 8
        assert kept.take(OTHER_FILE) is None
        assert kept.take(FILE) is model
        assert lazily_free() - before < sum(SIZES) / 8
        assert all(map(torch.equal, model.origin.tables, copies))
        assert kept.take(FILE) is None
        # Another version with equal tables has these again.
        assert memory.find((str(FILE), "1"), OTHER_FILE).data_ptr() == (
            model.origin.tables[1].data_ptr()
        )


@pytest.mark.parametrize(("table", "page"), [(0, 0), (0, 8448), (1, 17)])
def test_a_model_is_not_given_where_the_system_has_taken_a_page_of_its_tables(memory, table, page):
    kept = KeptModels(memory, 60)
    model, _ = new_model(memory)
    address = model.origin.tables[table].data_ptr()
    kept.keep(model)
    take_page(address, page)
    assert kept.take(FILE) is None
    del model
    # The memory is the next table's; what was whole can be found, and what was not cannot.
    assert memory.find((str(FILE), str(table)), FILE) is None
    assert memory.find((str(FILE), str(1 - table)), FILE) is not None
    assert memory.new(SIZES[table]).data_ptr() == address


def test_a_kept_model_is_whole_or_not_given_where_the_kernel_is_to_take_it(memory):
    kept = KeptModels(memory, 60)
    model, copies = new_model(memory)
    kept.keep(model)
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    pageout = 21  # MADV_PAGEOUT of <asm-generic/mman-common.h>; older kernels decline
    libc.madvise(model.origin.tables[0].data_ptr(), 32 * MIB, pageout)
    if kept.take(FILE) is not None:
        assert all(map(torch.equal, model.origin.tables, copies))


def test_a_model_is_not_kept_while_another_has_one_of_its_tables(memory):
    kept, before = KeptModels(memory, 60), lazily_free()
    model, copies = new_model(memory)
    other = memory.find((str(FILE), "1"), OTHER_FILE)
    kept.keep(model)
    assert lazily_free() - before < MIB
    assert kept.take(FILE) is None
    assert torch.equal(other, copies[1])
    del other
    kept.keep(model)
    assert kept.take(FILE) is model


def test_what_a_kept_model_has_is_nobody_elses(memory):
    kept = KeptModels(memory, 60)
    model, _ = new_model(memory)
    kept.keep(model)
    assert memory.find((str(FILE), "0"), OTHER_FILE) is None
    assert memory.new(SIZES[0]).data_ptr() != model.origin.tables[0].data_ptr()


def test_none_is_kept_while_a_package_is_loaded_which_has_their_memory(memory):
    kept, before = KeptModels(memory, 60), lazily_free()
    model, copies = new_model(memory)
    address = model.origin.tables[0].data_ptr()
    kept.keep(model)
    del model
    with kept.loading():
        assert kept.take(FILE) is None
        assert torch.equal(memory.find((str(FILE), "1"), FILE), copies[1])
        assert memory.new(SIZES[0]).data_ptr() == address
        other, _ = new_model(memory, OTHER_FILE, sizes=(5 * MIB,))
        kept.keep(other)
        assert kept.take(OTHER_FILE) is None
    kept.keep(other)
    assert kept.take(OTHER_FILE) is other
    assert lazily_free() - before < sum(SIZES)


def test_a_model_that_nobody_has_taken_is_gone_after_a_while_with_its_memory(memory):
    kept, before = KeptModels(memory, 0.5), lazily_free()
    for _ in range(2):
        model, _ = new_model(memory)
        kept.keep(model)
        del model
        assert lazily_free() - before > sum(SIZES) * 7 / 8
        wait_until(lambda: lazily_free() - before < MIB)
        assert kept.take(FILE) is None


def test_few_models_are_kept(memory):
    kept = KeptModels(memory, 60)
    models = [new_model(memory, (number,), sizes=())[0] for number in range(MOST_MODELS + 1)]
    for model in models:
        kept.keep(model)
    assert kept.take((0,)) is None
    assert [kept.take((number,)) for number in range(1, MOST_MODELS + 1)] == models[1:]


def test_a_model_without_an_origin_is_not_kept(memory):
    kept = KeptModels(memory, 60)
    kept.keep(SimpleNamespace(origin=None))
    with kept.loading():
        pass


# What `tessera serve` loads.


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    features = {"user": TableConfig(rows=60_000), "item": TableConfig(rows=50_000)}
    folder = tmp_path_factory.mktemp("package")
    return make_package(folder, name="ranker", features=features, dim=64)[0]


def load(loader, path):
    return loader.load(path, lambda _: None, beside_others=True)


def keep(loader, model):
    loader.keep(model)
    loader.release()


@pytest.fixture
def loader():
    return PackageVersionLoader(ServerConfig(model_repositories=("models",)), None)


def test_a_version_that_comes_again_has_its_model(loader, package):
    first = load(loader, package)
    assert len(first.origin.tables) > 0
    runner = first.runner
    keep(loader, first)
    del first
    begin = time.perf_counter()
    again = load(loader, package)
    assert again.runner is runner
    assert 0 < again.load_seconds <= time.perf_counter() - begin
    assert load(loader, package).runner is not runner  # while it is used


def test_a_version_whose_file_was_written_to_is_loaded_anew(loader, package):
    first = load(loader, package)
    keep(loader, first)
    status = package.stat()
    os.utime(package, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))
    assert load(loader, package).runner is not first.runner


def test_a_model_with_much_beside_its_tables_is_not_kept(loader, package, monkeypatch):
    monkeypatch.setattr(version_loader, "MOST_OWN_BYTES", 1000)
    first = load(loader, package)
    assert first.origin is None
    keep(loader, first)
    assert load(loader, package).runner is not first.runner


def test_a_followed_model_is_not_kept(package):
    config = ServerConfig(model_repositories=("models",), follow=True)
    loader = PackageVersionLoader(config, None)
    first = load(loader, package)
    assert first.origin is None
    keep(loader, first)
    assert load(loader, package).runner is not first.runner
