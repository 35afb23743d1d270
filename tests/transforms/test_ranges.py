"""What a run says of its training rows' dense columns, against a slow look at them."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.serving.package.records import Records
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import package_run
from tessera.training.config import load_config
from tessera.training.data.loader import BatchLoader
from tessera.training.data.opening import open_data
from tessera.training.trained import load_trained
from tessera.training.trainer.checkpoint import read_plain
from tessera.training.trainer.files import latest_checkpoint
from tessera.training.trainer.run import train
from tessera.training.transforms.ranges import ColumnRange, RangeAccumulator, ranges_from_json
from tests.transforms.table_runs import write_run


def slowly(rows):
    found = []
    for column in zip(*rows, strict=True):
        finite = [value for value in column if math.isfinite(value)]
        found.append(
            ColumnRange(
                least=min(finite) if finite else None,
                most=max(finite) if finite else None,
                missing=sum(map(math.isnan, column)) / len(column),
            )
        )
    return tuple(found)


def hostile_rows(seed):
    chance = np.random.default_rng(seed)
    rows = chance.standard_normal((97, 5)).astype(np.float32)
    rows[chance.random(rows.shape) < 0.2] = np.nan
    rows[chance.random(rows.shape) < 0.1] = np.inf
    rows[chance.random(rows.shape) < 0.1] = -np.inf
    rows[:, 3] = np.nan
    rows[:, 4] = [np.inf if row % 2 else -np.inf for row in range(97)]
    return rows


@pytest.mark.parametrize("seed", range(5))
def test_any_batches_in_any_accumulators_give_what_a_slow_look_does(seed):
    rows = hostile_rows(seed)
    chance = np.random.default_rng(seed)
    parts = [RangeAccumulator(5) for _ in range(3)]
    for begin in range(0, 97, 10):
        batch = torch.from_numpy(rows[begin : begin + 10])
        parts[chance.integers(3)].update(batch)
    parts[0].update(torch.empty(0, 5))
    whole = RangeAccumulator(5)
    for part in chance.permutation(parts):
        whole.merge(part)
    assert whole.ranges() == slowly(rows.tolist())
    assert ranges_from_json([own.to_json() for own in whole.ranges()]) == whole.ranges()


def dense_of(view):
    batches = BatchLoader(view, batch_size=100, shuffle=False, seed=0).epoch(0)
    return torch.cat([batch.dense_features for batch in batches])


def test_no_rows_say_nothing():
    assert RangeAccumulator(2).ranges() == ()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranges")
    config = load_config(write_run(folder))
    assert train(config, folder / "run", progress=False).status == "finished"
    return config, folder / "run"


def test_the_training_rows_alone_are_looked_at(run):
    config, folder = run
    splits = open_data(config.data, progress=False)
    rows = dense_of(splits.train)
    assert len(splits.valid) > 0
    expected = slowly(rows.tolist())
    assert load_trained(folder).ranges == expected
    whole = RangeAccumulator(2)
    for split in (splits.train, splits.valid, splits.test):
        whole.update(dense_of(split))
    assert whole.ranges() != expected  # the others would show


def test_a_package_carries_them_and_what_is_no_input(run, tmp_path):
    _, folder = run
    path = tmp_path / "m.pt"
    package_run(folder, path, PackageOptions(name="m"), progress=False)
    schema = Records(Path(path)).manifest().schema
    assert [vars(own) for own in schema.dense_ranges] == [
        own.to_json() for own in load_trained(folder).ranges
    ]
    assert [(one.name, one.role) for one in schema.other_columns] == [("clicked", "label")]


def test_a_run_that_goes_on_keeps_them(run, tmp_path):
    config, folder = run
    stops = iter([False] * 2 + [True] * 1000)
    part = train(config, tmp_path / "run", progress=False, should_stop=lambda: next(stops))
    assert part.status == "interrupted"
    assert read_plain(latest_checkpoint(tmp_path / "run" / "checkpoints"))["ranges"]
    assert train(config, tmp_path / "run", progress=False, resume=True).status == "finished"
    assert load_trained(tmp_path / "run").ranges == load_trained(folder).ranges
