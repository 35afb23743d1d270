"""Users' modules through the API and the command line, against the modules themselves."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tessera.cli import main
from tessera.kernels.libraries import load_libraries
from tessera.serving import FeatureRule, ModelInputs, package_model
from tessera.serving.package.loading import LoadedPackage, load_package
from tessera.serving.package.runner import HostBatch
from tessera.serving.package.schema import FeatureSpec, InputSchema
from tessera.serving.packaging.collections.find import find_tables
from tessera.serving.packaging.inputs import named_outputs
from tessera.serving.packaging.lookups.backends import lookup_backend
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.servable import ServableModel, make_servable
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.modules.hashing import hash_ids
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tests.packaging import user_models
from tests.packaging.backends import EACH_BACKEND
from tests.packaging.batches import random_batch
from tests.packaging.user_models import FACTORIES


class Made:
    """A user's module, the same in its served form, and the package that it became."""

    def __init__(self, name: str, backend: str, folder: Path, **choices: object) -> None:
        load_libraries(lookup_backend(backend).operator_libraries)
        self.module, self.inputs, self.sample = FACTORIES[name]()
        self.module.eval()
        options = PackageOptions(name="m", backend=backend, **choices)
        self.servable: ServableModel = make_servable(
            (self.module, self.inputs or ModelInputs(), self.sample), options
        )
        path = folder / f"{name}-{backend}.pt"
        package_model(self.module, self.inputs, self.sample, out=path, backend=backend, **choices)
        self.package: LoadedPackage = load_package(path)
        self.schema: InputSchema = self.package.manifest.schema

    def arguments(
        self, batch: HostBatch, *, rows: bool = False
    ) -> list[Tensor | KeyedJaggedTensor]:
        """What the module takes; with ``rows`` instead of raw ids where the package hashes."""
        made: list[Tensor | KeyedJaggedTensor] = []
        for given_ in self.sample:
            if isinstance(given_, Tensor):
                made.append(batch.float_features)
                continue
            scored = given_.weights_or_none() is not None
            group = self.schema.group("id_score_list" if scored else "id_list")
            kind = "id_score_list_features" if scored else "id_list_features"
            lengths, values = getattr(batch, f"{kind}_lengths"), getattr(batch, f"{kind}_values")
            if rows:
                values = self.hashed(group, lengths, values)
            weights = batch.id_score_list_features_weights if scored else None
            keys = [feature.name for feature in group]
            made.append(KeyedJaggedTensor(keys, values, weights, lengths))
        return made

    def hashed(self, group: tuple[FeatureSpec, ...], lengths: Tensor, values: Tensor) -> Tensor:
        own = values.long().split(lengths.view(len(group), -1).sum(dim=1).tolist())
        parts = []
        for feature, ids in zip(group, own, strict=True):
            known = feature.name in self.rules
            rows = hash_ids(ids, feature.hashing if known else "none", feature.rows)
            parts.append(rows.clamp(0, feature.rows - 1) if known else rows)
        return torch.cat(parts)

    @property
    def rules(self) -> dict[str, FeatureRule]:
        return {} if self.inputs is None else dict(self.inputs.features)

    def answer(self, module: nn.Module, batch: HostBatch, *, rows: bool) -> dict[str, Tensor]:
        with torch.inference_mode():
            found = module(*self.arguments(batch, rows=rows))
        outputs = named_outputs(found, self.schema.outputs[0].name)
        outputs = {name: value.float() for name, value in outputs.items()}
        widths = {output.name: output.width for output in self.schema.outputs}
        return {
            n: v.squeeze(1) if widths[n] == 1 and v.dim() == 2 else v for n, v in outputs.items()
        }

    def batch(self, size: int, *, max_length: int, seed: int) -> HostBatch:
        made = random_batch(self.schema, size, max_length=max_length, seed=seed)
        made.float_features.nan_to_num_(0.0)
        return made


@pytest.fixture(scope="module", params=FACTORIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=EACH_BACKEND)
def made(
    request: pytest.FixtureRequest, name: str, tmp_path_factory: pytest.TempPathFactory
) -> Made:
    return Made(name, request.param, tmp_path_factory.mktemp("user"))


def check_same(made: Made, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == [output.name for output in made.schema.outputs]
    for name, value in expected.items():
        if made.package.manifest.backend == "tessera":
            assert torch.equal(found[name], value), name
        else:
            # The loader rewrites torch's dense layers, and so the order of their sums.
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


@settings(max_examples=15)
@given(
    size=st.one_of(st.integers(1, 12), st.sampled_from([64, 511, 512])),
    max_length=st.sampled_from([0, 1, 3, 40]),
    seed=st.integers(0, 1000),
)
def test_the_package_answers_as_its_graph_and_the_quantized_module_in_python(
    made: Made, size: int, max_length: int, seed: int
) -> None:
    batch = made.batch(size, max_length=max_length, seed=seed)
    found = made.package.runner.forward(batch)
    with torch.inference_mode():
        check_same(made, found, made.servable.graph(*batch.tensors()))
    for output, value in made.answer(made.servable.packed, batch, rows=False).items():
        # Sums of the layers in another order.
        torch.testing.assert_close(found[output], value, rtol=1e-5, atol=1e-5)
    for output in made.schema.outputs:
        shape = (size,) if output.width == 1 else (size, output.width)
        assert found[output.name].shape == shape
        assert found[output.name].dtype == torch.float32


@pytest.mark.parametrize(("size", "max_length"), [(1, 0), (1, 5), (3, 0), (77, 9)])
def test_the_package_is_the_users_module_over_the_stored_values(
    made: Made, size: int, max_length: int
) -> None:
    dequantized = copy.deepcopy(made.module)
    for collection in find_tables(dequantized).collections:
        bags = getattr(collection.module, "embedding_bags", None)
        for config, table in zip(_configs(collection.module), collection.tables, strict=True):
            weights = (collection.module.embeddings if bags is None else bags)[config.name].weight
            weights.data.copy_(made.servable.tables.values(table.stored))
    batch = made.batch(size, max_length=max_length, seed=size)
    found = made.package.runner.forward(batch)
    # Sums of up to 9 rows and of the layers in another order; the module's own arithmetic.
    for name, value in made.answer(dequantized, batch, rows=True).items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4)
    # int8 moves a row's element by 1/255 of the row's range at most, here 2; the layers are of
    # the size that torch gives them, which spread such errors without growing them much.
    for name, value in made.answer(made.module, batch, rows=True).items():
        scale = max(1.0, float(value.abs().max()))
        assert (found[name] - value).abs().max() <= 0.05 * scale, name


def _configs(collection: nn.Module) -> list:
    if isinstance(collection, EmbeddingBagCollection):
        return collection.embedding_bag_configs()
    return collection.embedding_configs()


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_fp32_packages_give_the_modules_own_numbers(
    name: str, backend: str, tmp_path: Path
) -> None:
    made = Made(name, backend, tmp_path, dtype="fp32")
    for size, length in ((1, 3), (40, 6)):
        batch = made.batch(size, max_length=length, seed=size)
        found = made.package.runner.forward(batch)
        for output, value in made.answer(made.module, batch, rows=True).items():
            # The same numbers summed in other orders.
            torch.testing.assert_close(found[output], value, rtol=2e-5, atol=2e-5)


def test_the_command_line_packages_what_a_factory_returns(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.pt"
    assert (
        main(
            ["package-model", "--factory", f"tests.packaging.user_models:{name}", "--out", str(out)]
        )
        == 0
    )
    assert f"wrote {out}" in capsys.readouterr().out
    manifest = load_package(out).manifest
    kind = type(FACTORIES[name]()[0]).__name__
    assert manifest.source == {"module": f"tests.packaging.user_models.{kind}"}
    assert manifest.evaluation is None


def test_the_module_is_left_as_it_was() -> None:
    module, inputs, sample = user_models.multi_task()
    module.train()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    kinds = [type(part) for part in module.modules()]
    make_servable((module, inputs, sample), PackageOptions(name="m"))
    assert module.training
    assert [type(part) for part in module.modules()] == kinds
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_a_tied_table_is_stored_once_and_a_shared_name_twice(tmp_path: Path) -> None:
    module, inputs, sample = user_models.multi_task()
    manifest = package_model(module, inputs, sample, out=tmp_path / "tied.pt")
    assert [table.name for table in manifest.tables] == ["item", "brand", "item_again"]
    module.second = EmbeddingBagCollection([user_models.table("item", ["seen_items"])])
    manifest = package_model(module, inputs, sample, out=tmp_path / "apart.pt")
    names = [table.name for table in manifest.tables]
    assert names == ["item", "brand", "item_again", "second.item"]
    features = {feature.name: feature for feature in manifest.schema.features}
    assert features["seen_items"].table == "second.item"
    assert (features["item"].table, features["item"].rows) == ("item", 60)
    load_package(tmp_path / "apart.pt")


def test_what_the_module_hashes_itself_is_in_the_schema(tmp_path: Path) -> None:
    manifest = package_model(*user_models.hashed(), out=tmp_path / "m.pt")
    features = {feature.name: feature for feature in manifest.schema.features}
    assert (features["user"].hashing, features["user"].table) == ("murmur3", "user")
    hour = features["hour"]
    assert (hour.table, hour.rows, hour.pooling, hour.out_of_range) == ("", 24, "none", "reject")
