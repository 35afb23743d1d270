"""Tables spread over shards: the plan, and answers that are the same bits on CPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.kernels.libraries import LibraryError, library_path, load_libraries
from tessera.kernels.row_types import ROW_TYPES
from tessera.serving import package_model
from tessera.serving.package.devices import default_devices, shard_of
from tessera.serving.package.loading import load_package
from tessera.serving.package.manifest import ShardingPlan
from tessera.serving.package.runner import HostBatch
from tessera.serving.package.schema import FeatureSpec
from tessera.serving.packaging.lookups.backends import BACKENDS
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.serving.packaging.ranking import ranking_source
from tessera.serving.packaging.script import script
from tessera.serving.packaging.servable import make_servable
from tessera.serving.packaging.tables.quantize import FloatTable, quantize_tables
from tessera.serving.packaging.tables.shard import plan_shards
from tessera.serving.packaging.trace import trace
from tessera.training.models.config import TableConfig
from tests.package_factory import FEATURES, make_model
from tests.packaging import user_models
from tests.packaging.batches import random_batch
from tests.packaging.user_models import FACTORIES


def _built() -> bool:
    try:
        return bool(library_path("tessera_ops"))
    except LibraryError:
        return False


pytestmark = pytest.mark.skipif(not _built(), reason="the operators are not built (make build)")

WAYS = ("table_wise", "row_wise", "column_wise")


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    load_libraries(["tessera_ops"])


class OneLookup(nn.Module):
    def __init__(self, lookup: nn.Module) -> None:
        super().__init__()
        self.lookup = lookup

    def forward(self, ids: Tensor, lengths: Tensor, weights: Tensor) -> Tensor:
        return self.lookup(ids, lengths, weights)


class OneRows(OneLookup):
    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.lookup(ids, lengths)


@settings(max_examples=40)
@given(data=st.data())
def test_any_mix_of_cuts_and_types_gives_the_bits_of_one_shard(data: st.DataObject) -> None:
    usable = st.sampled_from(sorted(BACKENDS["tessera"].weight_types))
    kinds = [ROW_TYPES[name] for name in data.draw(st.lists(usable, min_size=1, max_size=4))]
    shards = data.draw(st.integers(2, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    tables, types, ways = [], {}, {}
    for number, kind in enumerate(kinds):
        rows = data.draw(st.integers(shards, 20))
        dim = kind.group_columns * data.draw(st.integers(shards, 20))
        tables.append(
            FloatTable(name=str(number), weights=torch.randn(rows, dim, generator=generator))
        )
        types[str(number)] = kind
        # The first is cut, so that no shard is empty.
        ways[str(number)] = data.draw(st.sampled_from(WAYS if number else WAYS[1:]))
    plan = plan_shards(tables, types, shards=shards, by_pattern=ways)
    turned = data.draw(st.integers(0, shards - 1))
    placements = [replace(p, shard=(p.shard + turned) % shards) for p in plan.placements]
    plan = ShardingPlan(num_shards=shards, placements=tuple(placements))
    one, many = quantize_tables(tables, types), quantize_tables(tables, types, plan=plan)
    assert len(many.buffers) == shards
    for table in tables:
        assert torch.equal(one.values(table.name), many.values(table.name))
    features = []
    for number in range(data.draw(st.integers(1, 6))):
        table = tables[number % len(tables)]
        features.append(
            FeatureSpec(
                name=f"f{number}",
                group="id_list",
                table=table.name,
                rows=table.weights.shape[0],
                dim=table.weights.shape[1],
                pooling=data.draw(st.sampled_from(["sum", "mean"])),
                hashing=data.draw(st.sampled_from(["none", "modulo", "murmur3"])),
                out_of_range=data.draw(st.sampled_from(["clamp", "hash"])),
            )
        )
    given_ = [f if data.draw(st.booleans()) or not n else None for n, f in enumerate(features)]
    names = data.draw(st.permutations([f.name for f in given_ if f is not None]))
    backend = BACKENDS["tessera"]
    whole = OneLookup(backend.lookup(one, given_, names))
    spread = script(trace(OneLookup(backend.lookup(many, given_, names))))
    rows = OneRows(backend.lookup_rows(one, features[:1]))
    rows_spread = script(trace(OneRows(backend.lookup_rows(many, features[:1]))))
    for size in (1, data.draw(st.integers(2, 9))):
        lengths = torch.randint(0, 5, (len(given_) * size,), generator=generator, dtype=torch.int32)
        if data.draw(st.booleans()):
            lengths[:] = 0
        ids = torch.randint(-9, 30, (int(lengths.sum()),), generator=generator)
        ids = ids.to(data.draw(st.sampled_from([torch.int32, torch.int64])))
        weights = torch.rand(len(ids), generator=generator)
        assert torch.equal(spread(ids, lengths, weights), whole(ids, lengths, weights))
        own = lengths[:size], ids[: int(lengths[:size].sum())]
        assert torch.equal(rows_spread(own[1], own[0]), rows(own[1], own[0]))


@pytest.fixture(scope="module", params=FACTORIES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    path = tmp_path_factory.mktemp("whole") / "m.pt"
    package_model(*FACTORIES[request.param](), out=path)
    return request.param, load_package(path)


@pytest.mark.parametrize("sharding", WAYS)
@pytest.mark.parametrize("shards", [2, 3])
def test_a_users_package_in_shards_answers_as_the_one_without(
    whole: tuple, shards: int, sharding: str, tmp_path: Path
) -> None:
    name, one = whole
    module, inputs, sample = FACTORIES[name]()
    tables = {
        "hashed": 1,
        "tutorial": 2,
        "two_tower": 2,
        "positioned": 2,
        "reshuffled": 2,
        "wide": 3,
    }
    if sharding == "table_wise" and tables.get(name, 3) < shards:
        with pytest.raises(UserError, match="would hold nothing; give fewer shards"):
            package_model(
                module, inputs, sample, out=tmp_path / "m.pt", shards=shards, sharding=sharding
            )
        return
    if sharding == "column_wise" and name == "wide":
        with pytest.raises(UserError, match="60 rows and 1 columns, too few to be cut by columns"):
            package_model(
                module, inputs, sample, out=tmp_path / "m.pt", shards=shards, sharding=sharding
            )
        return
    out = tmp_path / "m.pt"
    package_model(module, inputs, sample, out=out, shards=shards, sharding=sharding)
    many = load_package(out)
    assert many.manifest.plan.num_shards == shards
    assert {p.shard for p in many.manifest.plan.placements} == set(range(shards))
    for size in (1, 2, 33, 512):
        batch = random_batch(one.manifest.schema, size, max_length=9, seed=size)
        batch.float_features.nan_to_num_(0.0)
        found, expected = many.runner.forward(batch), one.runner.forward(batch)
        for output, value in expected.items():
            assert torch.equal(found[output], value), output


@pytest.mark.parametrize("sharding", ["auto", *WAYS])
def test_a_trained_models_shards_answer_as_one(sharding: str, tmp_path: Path) -> None:
    weighted = {**FEATURES, "watch": TableConfig(rows=90, weighted=True, pooling="mean")}
    model = make_model(features=weighted)
    write_model(model, tmp_path / "one.pt", PackageOptions(name="m"))
    one = load_package(tmp_path / "one.pt")
    options = PackageOptions(name="m", shards=3, sharding=sharding)
    write_model(model, tmp_path / "three.pt", options)
    three = load_package(tmp_path / "three.pt")
    for size in (1, 7, 512):
        batch = random_batch(one.manifest.schema, size, max_length=20, seed=size)
        assert torch.equal(
            three.runner.forward(batch)["default"], one.runner.forward(batch)["default"]
        )


@pytest.mark.parametrize("sharding", WAYS)
def test_a_gpus_graph_gives_the_same_answers(sharding: str) -> None:
    # The graph for GPUs runs on a CPU as well; its sums over rows have another order.
    module, inputs, sample = user_models.multi_task()
    one = make_servable((module, inputs, sample), PackageOptions(name="m", device="cuda"))
    many = make_servable(
        (module, inputs, sample),
        PackageOptions(name="m", device="cuda", shards=2, sharding=sharding),
    )
    batch = random_batch(one.schema, 40, max_length=9, seed=1)
    batch.float_features.nan_to_num_(0.0)
    with torch.inference_mode():
        found, expected = many.scripted(*batch.tensors()), one.scripted(*batch.tensors())
    for output, value in expected.items():
        if sharding == "row_wise":
            # Up to 9 terms of magnitude 1 per sum, and the layers above them.
            torch.testing.assert_close(found[output], value, rtol=0, atol=1e-5)
        else:
            assert torch.equal(found[output], value)


def test_fbgemm_has_no_shards() -> None:
    with pytest.raises(UserError, match="the fbgemm backend packages for one CPU"):
        PackageOptions(name="m", backend="fbgemm", shards=2)


def test_a_tensors_shard_is_in_its_name() -> None:
    assert shard_of("module_user_tessera_shard_12_rows") == 12
    assert shard_of("graph.tessera_shard_3_cut_plan") == 3
    assert shard_of("module_shard_2_weight") == 0
    assert default_devices("cpu", 3) == ["cpu"] * 3


def test_every_tensor_of_a_shard_is_named_after_it() -> None:
    servable = make_servable(
        ranking_source(make_model()),
        PackageOptions(name="m", shards=2, sharding="row_wise", device="cuda"),
    )
    buffers = dict(servable.scripted.named_buffers())
    sizes = {len(buffer) for buffer in servable.tables.buffers}
    rows = {name for name, buffer in buffers.items() if buffer.dtype == torch.uint8}
    assert {shard_of(name) for name in rows} == {0, 1}
    assert all("tessera_shard_" in name for name in rows)
    assert {len(buffers[name]) for name in rows} == sizes


def test_an_empty_batch_of_ids_needs_no_rows(tmp_path: Path) -> None:
    module, inputs, sample = user_models.tutorial()
    package_model(module, inputs, sample, out=tmp_path / "m.pt", shards=2, sharding="row_wise")
    runner = load_package(tmp_path / "m.pt").runner
    empty = torch.empty(0)
    batch = HostBatch(
        float_features=torch.empty(4, 0),
        id_list_features_lengths=torch.zeros(8, dtype=torch.int32),
        id_list_features_values=empty.int(),
        id_score_list_features_lengths=empty.int(),
        id_score_list_features_values=empty.int(),
        id_score_list_features_weights=empty,
        batch_size=4,
    )
    assert all(not value.any() for value in runner.forward(batch).values())
