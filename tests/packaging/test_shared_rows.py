"""The method that looks shared rows up once, against `forward` of the samples that repeat them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tessera.kernels.libraries import LibraryError, library_path
from tessera.serving import ModelInputs
from tessera.serving.package.golden import GoldenMismatchError, replay_golden, write_golden
from tessera.serving.package.loading import load_package
from tessera.serving.package.manifest import GoldenInfo
from tessera.serving.package.runner import HostBatch, TorchScriptRunner, as_shared
from tessera.serving.package.schema import InputSchema
from tessera.serving.package.torchscript import optimize
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.ranking import ranking_source
from tessera.serving.packaging.servable import ServableModel, make_servable
from tessera.serving.packaging.source import Source
from tessera.training.models.config import TableConfig
from tests.package_factory import FEATURES, make_model, make_package
from tests.packaging import user_models
from tests.packaging.batches import random_batch


def _built() -> bool:
    try:
        return bool(library_path("tessera_ops"))
    except LibraryError:
        return False


pytestmark = pytest.mark.skipif(not _built(), reason="the operators are not built (make build)")

WEIGHTED = {**FEATURES, "score": TableConfig(rows=40, weighted=True)}
MODELS = {
    "every rule": ({}, {}),
    "int4": ({}, {"dtype": "int4"}),
    "an interaction by cross network": ({"arch": "dlrm_dcn"}, {}),
    "shards by table": ({}, {"shards": 2, "sharding": "table_wise"}),
    "shards by column": ({}, {"shards": 2, "sharding": "column_wise"}),
}


def servable(name: str) -> ServableModel:
    model, options = MODELS[name]
    return make_servable(
        ranking_source(make_model(**model)), PackageOptions(name="m", backend="tessera", **options)
    )


def shared_form(
    batch: HostBatch, schema: InputSchema, shared: list[bool], rows: Tensor
) -> tuple[HostBatch, HostBatch]:
    """Row ``r`` of ``batch``'s samples is given once: the compact form, and the repeating one.

    ``batch`` has as many samples as there are rows or results, whichever are more.
    """
    B, features = len(rows), len(schema.group("id_list"))
    given = batch.id_list_features_lengths.view(features, -1)
    bags = batch.id_list_features_values.split(batch.id_list_features_lengths.tolist())
    R = int(rows.max()) + 1
    once, repeated = [], []
    for f in range(features):
        own = list(bags[f * given.shape[1] : (f + 1) * given.shape[1]])
        spread = [own[row] for row in rows.tolist()] if shared[f] else own[:B]
        once += own[:R] if shared[f] else spread
        repeated += spread

    def with_bags(bags: list[Tensor]) -> HostBatch:
        empty = batch.id_list_features_values[:0]
        return replace(
            cut,
            id_list_features_lengths=torch.tensor([len(bag) for bag in bags]).int(),
            id_list_features_values=torch.cat([empty, *bags]),
        )

    cut = replace(batch, float_features=batch.float_features[:B], batch_size=B)
    compact = replace(
        with_bags(once),
        id_list_features_shared=torch.tensor(shared),
        shared_row_index=rows.int(),
    )
    return compact, with_bags(repeated)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_as_samples_that_repeat(name: str) -> None:
    made = servable(name)
    features = len(made.schema.group("id_list"))
    runners = [TorchScriptRunner(made.scripted), TorchScriptRunner(optimize(made.scripted))]
    assert all(runner.shares_rows for runner in runners)

    @settings(max_examples=25)
    @given(
        shared=st.lists(st.booleans(), min_size=features, max_size=features),
        shape=st.integers(1, 40).flatmap(lambda B: st.tuples(st.just(B), st.integers(1, B))),
        max_length=st.integers(0, 6),
        seed=st.integers(0, 2**31),
        id_type=st.sampled_from([torch.int32, torch.int64]),
    )
    def check(
        shared: list[bool], shape: tuple[int, int], max_length: int, seed: int, id_type: torch.dtype
    ) -> None:
        B, R = shape
        batch = random_batch(made.schema, B, max_length=max_length, seed=seed, id_type=id_type)
        rows = torch.randint(0, R, (B,), generator=torch.Generator().manual_seed(seed))
        shared[0] = True
        compact, repeated = shared_form(batch, made.schema, shared, rows)
        for runner in runners:
            found, expected = runner.forward(compact), runner.forward(repeated)
            assert torch.equal(found["default"], expected["default"])

    check()


def test_weighted_features_stay_with_their_samples() -> None:
    made = make_servable(
        ranking_source(make_model(features=WEIGHTED)), PackageOptions(name="m", backend="tessera")
    )
    runner = TorchScriptRunner(made.scripted)
    batch = random_batch(made.schema, 9, max_length=4, seed=1)
    rows = torch.tensor([0, 2, 1, 1, 0, 2, 2, 2, 0])
    compact, repeated = shared_form(batch, made.schema, [True, False] * 3 + [True], rows)
    assert torch.equal(runner.forward(compact)["default"], runner.forward(repeated)["default"])


def test_a_module_that_pools_shares_and_one_that_looks_at_lengths_does_not() -> None:
    options = PackageOptions(name="m", backend="tessera")

    def made(source: Source) -> ServableModel:
        module, inputs, sample = source
        return make_servable((module, inputs or ModelInputs(), sample), options)

    pooled = made(user_models.multi_task())
    runner = TorchScriptRunner(pooled.scripted)
    assert runner.shares_rows
    batch = random_batch(pooled.schema, 7, max_length=4, seed=2)
    batch = replace(batch, float_features=batch.float_features.nan_to_num())
    features = len(pooled.schema.group("id_list"))
    shared = [place % 3 != 1 for place in range(features)]
    compact, repeated = shared_form(
        batch, pooled.schema, shared, torch.tensor([1, 0, 1, 1, 2, 0, 2])
    )
    found, expected = runner.forward(compact), runner.forward(repeated)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not TorchScriptRunner(made(user_models.two_tower()).scripted).shares_rows


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "fbgemm"},
        {"backend": "tessera", "device": "cuda"},
        {"backend": "tessera", "shards": 2, "sharding": "row_wise"},
    ],
    ids=str,
)
def test_packages_that_repeat(options: dict[str, object]) -> None:
    made = make_servable(ranking_source(make_model()), PackageOptions(name="m", **options))  # type: ignore[arg-type]
    runner = TorchScriptRunner(made.scripted)
    assert not runner.shares_rows
    batch = as_shared(random_batch(made.schema, 3, max_length=2, seed=0))
    with pytest.raises(RuntimeError, match="the model has no forward_shared"):
        runner.forward(batch)


def test_a_loader_replays_the_golden_answers_by_both_methods(tmp_path: Path) -> None:
    path, _ = make_package(tmp_path, backend="tessera")
    loaded = load_package(path)
    assert loaded.runner.shares_rows
    batch = random_batch(loaded.manifest.schema, 4, max_length=3, seed=0)
    content = write_golden(batch, loaded.runner.forward(batch))

    class WrongWhereShared:
        shares_rows = True

        def forward(self, batch: HostBatch) -> dict[str, Tensor]:
            answers = loaded.runner.forward(batch)
            off = 0.0 if batch.sharing() is None else 1e-2
            return {name: answer + off for name, answer in answers.items()}

    info = GoldenInfo(samples=4, atol=1e-4, rtol=0.0)
    replay_golden(loaded.runner, content, info)
    with pytest.raises(GoldenMismatchError, match="golden sample 0"):
        replay_golden(WrongWhereShared(), content, info)
