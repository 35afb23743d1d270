"""The served form against the eager one, and against the trained float32 model."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import HostBatch, TorchScriptRunner
from tessera.serving.package.schema import InputSchema
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.serving.packaging.passes.onednn import SMALLEST_PACKED
from tessera.serving.packaging.passes.padding import pad_dense, pad_lengths, remove_padding
from tessera.serving.packaging.passes.registry import Target
from tessera.serving.packaging.ranking import ranking_source
from tessera.serving.packaging.servable import ServableModel, make_servable
from tessera.training.models.config import TableConfig
from tessera.training.models.ranking import RankingModel
from tests.package_factory import FEATURES, make_model, make_package
from tests.packaging.backends import EACH_BACKEND
from tests.packaging.batches import random_batch, sparse_features

WEIGHTED = {
    "click": TableConfig(rows=40, pooling="mean"),
    "watch": TableConfig(rows=90, weighted=True, dim=6),
    "user": TableConfig(rows=300, dim=4),
    "query": TableConfig(rows=90, weighted=True, pooling="mean", dim=10),
}
MODELS = {
    "every rule": {"arch": "dlrm", "features": FEATURES},
    "one rule, no dense": {
        "arch": "dlrm",
        "num_dense": 0,
        "features": {name: TableConfig(rows=100) for name in ("a", "b", "c")},
    },
    "weighted, mixed widths": {"arch": "dlrm_dcn", "features": WEIGHTED},
    "weighted only": {
        "arch": "dlrm_dcn",
        "num_dense": 2,
        "features": {"watch": TableConfig(rows=90, weighted=True)},
    },
    "shared table out of order": {
        "arch": "dlrm_dcn",
        "features": {
            "first": TableConfig(rows=30, table="shared", dim=5),
            "middle": TableConfig(rows=20, dim=3),
            "last": TableConfig(rows=30, table="shared", dim=5),
        },
    },
}

Made = tuple[RankingModel, ServableModel]


@pytest.fixture(scope="module", params=EACH_BACKEND)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, backend: str) -> Made:
    model = make_model(**MODELS[request.param])
    return model, make_servable(ranking_source(model), PackageOptions(name="m", backend=backend))


def dequantized(made: Made) -> RankingModel:
    """The trained model with the stored rows' values in its float32 tables."""
    model, servable = made
    copied = copy.deepcopy(model)
    for table in servable.tables.tables:
        values = servable.tables.values(table.info.name)
        bags = copied.arch.sparse_arch.embedding_bag_collection.embedding_bags
        bags[table.info.name].weight.data.copy_(values)
    return copied


def scores(runner_or_module: object, batch: HostBatch) -> torch.Tensor:
    with torch.inference_mode():
        return runner_or_module(*batch.tensors())["default"]


@settings(max_examples=25)
@given(
    batch_size=st.one_of(st.integers(1, 20), st.sampled_from([64, 511, 512])),
    max_length=st.sampled_from([0, 1, 3, 50]),
    id_type=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 1000),
)
def test_scripted_scores_are_the_eager_graphs_bit_for_bit(
    made: Made, batch_size: int, max_length: int, id_type: torch.dtype, seed: int
) -> None:
    _, servable = made
    batch = random_batch(
        servable.schema, batch_size, max_length=max_length, seed=seed, id_type=id_type
    )
    found = scores(servable.scripted, batch)
    assert found.shape == (batch_size,)
    assert found.dtype == torch.float32
    assert torch.equal(found, scores(servable.graph, batch))


@pytest.mark.parametrize("batch_size", [1, 2, 5, 64, 512])
@pytest.mark.parametrize("max_length", [0, 50])
def test_scores_are_those_of_the_trained_model_over_the_stored_values(
    made: Made, batch_size: int, max_length: int
) -> None:
    _, servable = made
    batch = random_batch(servable.schema, batch_size, max_length=max_length, seed=batch_size)
    with torch.inference_mode():
        logits = dequantized(made)(batch.float_features, sparse_features(batch, servable.schema))
    # The same numbers summed in other orders; a score moves by a quarter of its logit at most.
    torch.testing.assert_close(
        scores(servable.scripted, batch), torch.sigmoid(logits), rtol=0, atol=2e-5
    )


def test_pooled_vectors_are_within_the_error_of_their_rows(made: Made) -> None:
    model, servable = made
    batch = random_batch(servable.schema, 33, max_length=50, seed=3)
    sparse = sparse_features(batch, servable.schema)
    trained = model.arch.sparse_arch.embedding_bag_collection
    stored = servable.packed.model.arch.sparse_arch.embedding_bag_collection
    with torch.inference_mode():
        hashed = model.hasher(sparse)
        before = trained(hashed).to_dict()
        after = stored(sparse).to_dict()
    bags = sparse.to_dict()
    assert before.keys() == after.keys()
    for feature in servable.schema.features:
        # A bag's error is at most the sum of its rows' errors, each of them at most the
        # table's largest, times the id's weight, which is at most 1.
        ids = bags[feature.name].lengths()
        rows = ids.clamp(max=1) if feature.pooling == "mean" else ids
        largest = servable.tables.table(feature.table).info.max_abs_error
        bound = rows.unsqueeze(1) * (largest + 1e-5)
        assert (after[feature.name] - before[feature.name]).abs().le(bound).all()


@pytest.mark.parametrize("dtype", ["int8", "int4", "fp16", "fp32"])
def test_a_loaded_package_of_each_type_answers_like_the_eager_model(
    dtype: str, backend: str, tmp_path: Path
) -> None:
    path, model = make_package(tmp_path, dtype=dtype, backend=backend)
    package = load_package(path)
    assert package.manifest.backend == backend
    servable = make_servable(
        ranking_source(model), PackageOptions(name="m", dtype=dtype, backend=backend)
    )
    assert package.manifest.schema.features == servable.schema.features
    for batch_size in (1, 3, 100, 512):
        batch = random_batch(servable.schema, batch_size, max_length=50, seed=batch_size)
        # Loading rewrites the dense layers for speed, and so the order of their sums.
        torch.testing.assert_close(
            package.runner.forward(batch)["default"],
            scores(servable.eager, batch),
            rtol=0,
            atol=1e-5,
        )
        with torch.inference_mode():
            logits = model(batch.float_features, sparse_features(batch, servable.schema))
        if dtype == "fp32":
            torch.testing.assert_close(
                package.runner.forward(batch)["default"], torch.sigmoid(logits), rtol=0, atol=2e-5
            )


def test_the_trained_model_is_left_as_it_was() -> None:
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = [type(module) for module in model.modules()]
    make_servable(ranking_source(model), PackageOptions(name="m"))
    assert [type(module) for module in model.modules()] == modules
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(parameter.requires_grad for parameter in model.parameters())


def test_the_runner_may_be_called_from_several_threads(each_package: Path) -> None:
    loaded = load_package(each_package)
    batches = [
        random_batch(loaded.manifest.schema, size, max_length=5, seed=size) for size in range(1, 33)
    ]
    alone = [loaded.runner.forward(batch)["default"] for batch in batches]
    with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for _ in range(3):
            together = list(pool.map(loaded.runner.forward, batches))
            for one, other in zip(alone, together, strict=True):
                assert torch.equal(one, other["default"])


def graph_operators(servable: ServableModel) -> list[str]:
    return [node.kind() for node in servable.scripted.inlined_graph.nodes()]


def readers_of(names: set[str], block: Any) -> set[str]:
    """The kinds of the nodes that take one of these attributes."""
    found: set[str] = set()
    for node in block.nodes():
        if node.kind() == "prim::GetAttr" and node.s("name") in names:
            found.update(use.user.kind() for use in node.output().uses())
        for inner in node.blocks():
            found |= readers_of(names, inner)
    return found


@pytest.mark.parametrize("backend", ["tessera"], indirect=True)
def test_nothing_but_lookups_reads_the_rows(made: Made) -> None:
    """Servers lay a commit's rows over those of tables, of which nothing else knows."""
    _, servable = made
    lookups = {"tessera::lookup", "tessera::lookup_partly_shared", "tessera::lookup_rows"}
    scripted, (stored,) = servable.scripted, servable.tables.buffers
    names = {name for name, buffer in scripted.named_buffers() if torch.equal(buffer, stored)}
    assert names
    methods = [name for name in ("forward", "forward_shared") if hasattr(scripted, name)]
    for method in methods:
        readers = readers_of(names, getattr(scripted, method).inlined_graph)
        assert readers
        assert readers <= lookups


def test_dropout_is_gone_and_one_operator_looks_everything_up(backend: str) -> None:
    model = make_model(dropout=0.5)
    servable = make_servable(ranking_source(model), PackageOptions(name="m", backend=backend))
    operators = graph_operators(servable)
    assert sum(operators.count(linear) for linear in ("aten::linear", "tessera::linear")) == 5
    assert not [kind for kind in operators if "dropout" in kind]
    lookups = ("fbgemm::int_nbit_split_embedding_codegen_lookup_function", "tessera::lookup")
    assert sum(operators.count(lookup) for lookup in lookups) == 1
    batch = random_batch(servable.schema, 3, max_length=2, seed=0)
    assert torch.equal(scores(servable.scripted, batch), scores(servable.scripted, batch))


@pytest.mark.parametrize("backend", EACH_BACKEND[:1], indirect=True)
def test_nothing_but_two_operators_stands_between_ids_and_the_interaction(backend: str) -> None:
    features = {name: TableConfig(rows=100) for name in ("a", "b", "c")}
    servable = make_servable(
        ranking_source(make_model(features=features)), PackageOptions(name="m")
    )
    operators = graph_operators(servable)
    assert operators.count("tessera::dot_interaction") == 1
    assert operators.count("tessera::lookup") == 1
    assert operators.count("aten::cat") == 1  # the dense columns and which of them are missing
    gone = {"bmm", "index_select", "bitwise_and", "bitwise_xor", "mul", "repeat_interleave"}
    assert not [kind for kind in operators if kind.removeprefix("aten::") in gone]


@pytest.mark.parametrize("backend", EACH_BACKEND[:1], indirect=True)
@pytest.mark.parametrize("dtype", ["int8", "int4", "fp16", "fp32"])
def test_fbgemms_rows_and_scores_are_the_same(dtype: str, backend: str) -> None:
    model = make_model()
    names = (backend, "fbgemm")
    options = {name: PackageOptions(name="m", dtype=dtype, backend=name) for name in names}
    found = {name: make_servable(ranking_source(model), chosen) for name, chosen in options.items()}
    assert torch.equal(found[backend].tables.buffers[0], found["fbgemm"].tables.buffers[0])
    for size, length in ((1, 1), (3, 50), (64, 7)):
        batch = random_batch(found["fbgemm"].schema, size, max_length=length, seed=size)
        # The same rows; sums of up to 50 ids and of dot products in another order.
        torch.testing.assert_close(
            scores(found[backend].scripted, batch),
            scores(found["fbgemm"].scripted, batch),
            rtol=0,
            atol=1e-5,
        )


def test_outputs_carry_no_gradient(package: Path) -> None:
    loaded = load_package(package)
    assert isinstance(loaded.runner, TorchScriptRunner)
    batch = random_batch(loaded.manifest.schema, 2, max_length=2, seed=0)
    assert not loaded.runner.forward(batch)["default"].requires_grad


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, backend: str) -> tuple[Path, RankingModel]:
    """A model with layers large enough to be packed, one of them longer than 1,024."""
    features = {f"f{number}": TableConfig(rows=50) for number in range(40)}
    model = make_model(
        arch="dlrm_dcn", features=features, dim=32, dense_layers=(512, 256), over_layers=(256, 64)
    )
    path = tmp_path_factory.mktemp("wide") / "m.pt"
    write_model(model, path, PackageOptions(name="m", backend=backend))
    return path, model


@pytest.mark.parametrize("backend", EACH_BACKEND[:1], indirect=True)
def test_all_layers_are_tesseras_with_their_relu(
    wide: tuple[Path, RankingModel], backend: str
) -> None:
    _, model = wide
    servable = make_servable(ranking_source(model), PackageOptions(name="m", backend=backend))
    operators = graph_operators(servable)
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert operators.count("tessera::linear") == len(linears)
    assert not {"aten::linear", "aten::relu"} & set(operators)
    # None of them needs a padded batch; the sigmoid's padding stays.
    assert not servable.graph.graph.find_nodes(op="call_function", target=pad_dense)
    assert not servable.graph.graph.find_nodes(op="call_function", target=pad_lengths)
    batch = random_batch(servable.schema, 9, max_length=3, seed=0)
    torch.testing.assert_close(
        scores(servable.scripted, batch), scores(servable.eager, batch), rtol=0, atol=1e-5
    )


torch.fx.wrap("pad_dense")


class Product(torch.nn.Module):
    """Beside a padded input, a product that looks at the batch size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(pad_dense(x), x.t())


def test_padding_stays_where_torch_multiplies() -> None:
    graph = torch.fx.symbolic_trace(Product())
    remove_padding(graph, Target(backend="tessera", device="cpu", dense_dtype="fp32"))
    assert graph(torch.ones(1, 2)).shape == (4, 1)


@pytest.mark.parametrize("backend", ["fbgemm"], indirect=True)
def test_large_layers_are_packed_with_their_relu(wide: tuple[Path, RankingModel]) -> None:
    _, model = wide
    servable = make_servable(ranking_source(model), PackageOptions(name="m", backend="fbgemm"))
    operators = graph_operators(servable)
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    large = [linear for linear in linears if linear.weight.numel() >= SMALLEST_PACKED]
    assert len(large) == 2
    assert operators.count("mkldnn::_linear_pointwise") == len(large)
    assert operators.count("aten::linear") == len(linears) - len(large)
    relus = 5  # one behind each layer of the two MLPs; the cross network has none
    assert operators.count("aten::relu") == relus - len(large)
    batch = random_batch(servable.schema, 9, max_length=3, seed=0)
    torch.testing.assert_close(
        scores(servable.scripted, batch), scores(servable.eager, batch), rtol=0, atol=1e-5
    )
    assert torch.equal(scores(servable.scripted, batch), scores(servable.graph, batch))


@pytest.mark.parametrize("backend", ["fbgemm"], indirect=True)
def test_without_onednn_the_layers_stay_as_they_are(
    wide: tuple[Path, RankingModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = wide
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    servable = make_servable(ranking_source(model), PackageOptions(name="m", backend="fbgemm"))
    assert "mkldnn::_linear_pointwise" not in graph_operators(servable)
    batch = random_batch(servable.schema, 5, max_length=3, seed=0)
    assert torch.equal(scores(servable.scripted, batch), scores(servable.graph, batch))
    torch.testing.assert_close(
        scores(servable.scripted, batch), scores(servable.eager, batch), rtol=0, atol=1e-6
    )


def rows_of(batch: HostBatch, schema: InputSchema, begin: int, end: int) -> HostBatch:
    """Samples ``[begin, end)`` of a batch of ``id_list`` features."""
    features = len(schema.group("id_list"))
    lengths = batch.id_list_features_lengths
    bags = batch.id_list_features_values.split(lengths.tolist())
    size = batch.batch_size
    places = [f * size + sample for f in range(features) for sample in range(begin, end)]
    return HostBatch(
        float_features=batch.float_features[begin:end],
        id_list_features_lengths=lengths[places],
        id_list_features_values=torch.cat([bags[place] for place in places]),
        id_score_list_features_lengths=batch.id_score_list_features_lengths,
        id_score_list_features_values=batch.id_score_list_features_values,
        id_score_list_features_weights=batch.id_score_list_features_weights,
        batch_size=end - begin,
    )


def test_a_wide_models_score_has_the_same_bits_in_every_batch(
    wide: tuple[Path, RankingModel],
) -> None:
    check_same_bits(wide[0])


def test_a_samples_score_has_the_same_bits_in_every_batch(each_package: Path) -> None:
    check_same_bits(each_package)


def check_same_bits(path: Path) -> None:
    loaded = load_package(path)
    schema = loaded.manifest.schema
    whole = random_batch(schema, 131, max_length=7, seed=5)
    expected = loaded.runner.forward(whole)["default"]
    cuts = torch.randint(0, 131, (60, 2), generator=torch.Generator().manual_seed(0)).tolist()
    spans = [(begin, begin + size) for size in range(1, 40) for begin in (0, 3, 91)]
    for begin, end in [*spans, *((min(cut), max(cut) + 1) for cut in cuts)]:
        found = loaded.runner.forward(rows_of(whole, schema, begin, end))["default"]
        assert torch.equal(found, expected[begin:end]), (begin, end)
