"""Fitting by partitions: the same bits on every engine, and what one pass over all rows learns."""

import pytest
import torch

from tessera.cli import main
from tessera.errors import UserError
from tessera.partitions import LocalEngine
from tessera.training.config import load_config
from tessera.training.data.loader import BatchLoader
from tessera.training.data.opening import open_data
from tessera.training.data.table.parquet import TableFile
from tessera.training.trainer import fitting
from tessera.training.trainer.fitting import FittingWork, fit_transforms
from tessera.training.transforms.description import RawDense, Transforms
from tessera.training.transforms.fitting import FittingPass, fit
from tests.transforms.table_runs import write_run

TWICE = "{kind: dense, transform: [standardize, {quantile: {buckets: 8, to: id}}]}"
"""A column whose second transform is fitted in a second pass."""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return load_config(write_run(tmp_path_factory.mktemp("table"), age=TWICE))


@pytest.fixture(scope="module")
def train(config):
    return open_data(config.data, progress=False).train


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """400 rows in nine partitions of up to three batches."""
    monkeypatch.setattr(fitting, "BATCH_ROWS", 16)
    monkeypatch.setattr(fitting, "PART_ROWS", 48)


def equal(one, other):
    return (
        one.sizes == other.sizes
        and one.state.keys() == other.state.keys()
        and all(torch.equal(value, other.state[name]) for name, value in one.state.items())
    )


def learned(train, **options):
    transforms = train.dataset.columns.transforms()
    return fit_transforms(transforms, train, progress=False, **options)


def test_processes_change_no_bit(train):
    threads = torch.get_num_threads()
    alone = learned(train, engine=LocalEngine(processes=1))
    assert torch.get_num_threads() == threads
    for processes in (2, 3):
        assert equal(learned(train, engine=LocalEngine(processes=processes)), alone)
    assert equal(learned(train), alone)


@pytest.mark.parametrize("rows", [7, 400])
def test_partitions_learn_what_one_pass_over_all_rows_learns(train, rows):
    """Counts, samples and sums of 0 and 1 exactly; means within float32's rounding of them."""
    whole = BatchLoader(train, batch_size=rows, shuffle=False, seed=0, numbered=True)
    expected = fit(train.dataset.columns.transforms(), lambda: whole.epoch(0))
    found = learned(train)
    assert found.sizes == expected.sizes
    assert found.sizes.keys == 16
    for name, value in expected.state.items():
        if name.split(".")[-1] in {"mean_F", "scale_F"}:
            torch.testing.assert_close(found.state[name], value, rtol=1e-6, atol=0)
        else:
            assert torch.equal(found.state[name], value), name


def test_few_rows_have_the_bits_of_one_pass(train, monkeypatch):
    monkeypatch.setattr(fitting, "PART_ROWS", 16 * 1000)
    whole = BatchLoader(train, batch_size=16, shuffle=False, seed=0, numbered=True)
    with torch.random.fork_rng(devices=[]):
        expected = fit(train.dataset.columns.transforms(), lambda: whole.epoch(0))
    assert equal(learned(train), expected)


def test_passes_that_look_at_no_ids_do_not_read_them(config, train, monkeypatch):
    asked, read = [], TableFile.read

    def noted(file, groups, names):
        asked.append(set(names))
        return read(file, groups, names)

    monkeypatch.setattr(TableFile, "read", noted)
    whole = learned(train, engine=LocalEngine(processes=1))
    # The first pass counts ids, the second fits what stands behind another transform.
    assert [set(one) for one in dict.fromkeys(map(frozenset, asked))] == [
        {"price", "age", "country", "device", "item"},
        {"price", "age"},
    ]
    # A run whose transforms learn nothing still looks at the ranges of its dense values.
    asked.clear()
    columns = train.dataset.columns
    plain = Transforms(dense=tuple(RawDense(name=name) for name in columns.dense_names))
    found = fit_transforms(plain, train, progress=False, engine=LocalEngine(processes=1))
    assert found.ranges == whole.ranges
    assert set().union(*asked) == {"price", "age"}


def test_other_machines_must_find_the_same_rows(config, train):
    from tessera.training.transforms.preprocessor import Preprocessor

    one = FittingPass(Preprocessor(train.dataset.columns.transforms()), [], first=True)
    with pytest.raises(
        UserError, match=r"has 400 training rows on one machine .* and 7 on another"
    ):
        FittingWork(one, config.data, 7, None).start()
    with pytest.raises(UserError, match="fit with the local"):
        FittingWork(one, None, 400, None).start()


def test_the_command_takes_an_engine(config, tmp_path, capsys):
    wrong = ["train", "--config", "demo", "--out", str(tmp_path / "run"), "--ray-address", "a:1"]
    assert main(wrong) == 2
    assert "the local engine has none" in capsys.readouterr().err
