"""What cannot be packaged, what the user is told, and that the remedies work."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tessera.cli import main
from tessera.errors import UserError
from tessera.serving import FeatureRule, ModelInputs, package_model
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import HostBatch
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.servable import make_servable
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tests.packaging import user_models
from tests.packaging.batches import random_batch


def test_control_flow_is_refused_with_file_line_and_remedy() -> None:
    module, _, sample = user_models.branches()
    source, first = inspect.getsourcelines(user_models.Branches.forward)
    line = first + next(i for i, text in enumerate(source) if "if dense.sum() > 0" in text)
    with pytest.raises(UserError) as caught:
        make_servable((module, ModelInputs(), sample), PackageOptions(name="m"))
    message = str(caught.value)
    assert f"{user_models.__file__}:{line} in forward: `if dense.sum() > 0:`" in message
    assert "depends on the values of a request" in message
    for remedy in ("torch.where", "torch.fx.wrap", "leaf_modules"):
        assert remedy in message


def test_the_command_line_refuses_control_flow_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--factory",
        "tests.packaging.user_models:branches",
        "--out",
        str(tmp_path / "m.pt"),
    ]
    assert main(["package-model", *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert "user_models.py:" in error[0]


@torch.fx.wrap
def doubled_if_positive(pooled: Tensor, dense: Tensor) -> Tensor:
    if bool(dense.sum() > 0):
        return pooled * 2
    return pooled


class Wrapped(user_models.Branches):
    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        return doubled_if_positive(self.tables(ids).values(), dense).sum(dim=1)


class Chooser(nn.Module):
    def forward(self, pooled: Tensor, dense: Tensor) -> Tensor:
        if bool(dense.sum() > 0):
            pooled = pooled * 2
        return pooled


class WithLeaf(user_models.Branches):
    def __init__(self) -> None:
        super().__init__()
        self.chooser = Chooser()

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        return self.chooser(self.tables(ids).values(), dense).sum(dim=1)


@pytest.mark.parametrize(
    ("module", "leaves"), [(Wrapped(), ()), (WithLeaf(), ("chooser",)), (WithLeaf(), ("Chooser",))]
)
def test_the_remedies_for_control_flow_work(
    module: nn.Module, leaves: tuple[str, ...], tmp_path: Path
) -> None:
    _, _, sample = user_models.branches()
    out = tmp_path / "m.pt"
    package_model(module, None, sample, out=out, leaf_modules=leaves, dtype="fp32")
    runner = load_package(out).runner
    ids = user_models.bags(["a"])
    for sign in (1.0, -1.0):
        dense = torch.full((3, 2), sign)
        empty = torch.empty(0)
        batch = HostBatch(
            float_features=dense,
            id_list_features_lengths=ids.lengths().int(),
            id_list_features_values=ids.values(),
            id_score_list_features_lengths=empty.int(),
            id_score_list_features_values=empty.long(),
            id_score_list_features_weights=empty,
            batch_size=3,
        )
        with torch.inference_mode():
            expected = module(dense, ids)
        torch.testing.assert_close(runner.forward(batch)["default"], expected)


class Normed(user_models.Branches):
    """A layer of torch's own whose Python looks at sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, affine=True)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.norm(self.tables(ids).values().view(-1, 2, 4)).flatten(1)


class Attends(nn.Module):
    """torch's own layers, some of which fx cannot trace, and factories of traced sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection([user_models.table("a", ["a", "b"])])
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.memory = nn.GRU(8, 4, batch_first=True)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        vectors = self.tables(ids).values().view(-1, 2, 8)
        mixed, _ = self.attention(vectors, vectors, vectors, need_weights=False)
        _, last = self.memory(mixed)
        steps = torch.ones(vectors.size(0), 4) + torch.zeros([ids.stride(), 4])
        return last.squeeze(0) * steps


@pytest.mark.parametrize(("kind", "keys"), [(Attends, ["b", "a"]), (Normed, ["a"])])
def test_torchs_layers_with_branches_are_compiled_whole(
    kind: type[nn.Module], keys: list[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = kind().eval()
    out = tmp_path / "m.pt"
    package_model(module, None, (user_models.bags(keys),), out=out, dtype="fp32")
    loaded = load_package(out)
    for size in (1, 5):
        batch = random_batch(loaded.manifest.schema, size, max_length=3, seed=size)
        ids = KeyedJaggedTensor(
            keys, batch.id_list_features_values, lengths=batch.id_list_features_lengths
        )
        with torch.inference_mode():
            expected = module(ids)
        found = loaded.runner.forward(batch)["default"]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


IDS = user_models.bags(["a"])
DENSE = torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ((DENSE, DENSE, IDS), "2 arguments of kind 'dense'; a request has one of each kind"),
        ((DENSE.double(), IDS), r"sample_batch\[0\] is a torch.float64 tensor of shape \[3, 2\]"),
        ((DENSE, "ids"), r"sample_batch\[1\] is a str; give a float32 tensor"),
        ((DENSE[:2], IDS), r"arguments of \[2, 3\] samples"),
        ((DENSE, user_models.bags(["b"])), "feature 'b' goes to no embedding collection; say how"),
    ],
)
def test_a_sample_batch_that_cannot_be_a_request_is_refused(
    sample: tuple, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        package_model(Wrapped(), None, sample, out=tmp_path / "m.pt")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (ModelInputs(dense_features=["x"]), "has 1 names, the sample batch 2 columns"),
        (ModelInputs(features={"z": FeatureRule()}), "names 'z', which the sample batch has not"),
        (ModelInputs(features={"a": FeatureRule(rows=5)}), "its table has 60; leave rows out"),
        (ModelInputs(output="a b"), "the model's output is 'a b'"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    inputs: ModelInputs, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        package_model(Wrapped(), inputs, (DENSE, IDS), out=tmp_path / "m.pt")


class Returns(user_models.Branches):
    """Returns whatever a function makes of its pooled vectors."""

    def __init__(self, made: object) -> None:
        super().__init__()
        self.made = made

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> object:
        return self.made(self.tables(ids).values())


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda pooled: [pooled, pooled], "returns a list; return a dictionary"),
        (lambda pooled: {"a b": pooled}, "output 'a b' needs another name"),
        (lambda pooled: {"x": pooled.view(-1)}, r"'x' is of shape \[24\] for 3 samples"),
        (lambda pooled: {"x": 3}, "'x' is int for 3 samples"),
        (lambda pooled: {}, "returns no outputs"),
        (lambda pooled: pooled / pooled.abs().sum(dim=1, keepdim=True), "is NaN for sample 0 of"),
        (lambda pooled: pooled[:3].repeat(3, 1)[:9].sum(1), "output 'default' is of shape"),
        (lambda pooled: pooled.tolist(), "returns a list"),
        (lambda pooled: pooled.missing, "fails on the sample batch: AttributeError"),
        (lambda pooled: pooled + torch.arange(3.0).unsqueeze(1), "fails on a batch of 9 samples"),
    ],
)
def test_results_that_cannot_be_served_are_refused(
    made: object, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        package_model(Returns(made), None, (DENSE, IDS), out=tmp_path / "m.pt")


class Bare(nn.Module):
    def forward(self, dense: Tensor) -> Tensor:
        return dense


def test_a_module_without_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Bare has no EmbeddingBagCollection and no Embedding"):
        package_model(Bare(), None, (DENSE,), out=tmp_path / "m.pt")


def no_tuple() -> nn.Module:
    return Bare()


def leaves() -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("user_models", "--factory is 'user_models'; give pkg.module:function"),
        (
            "tests.packaging.user_models:nothing",
            "has no function nothing; it has",
        ),
        ("no_such_module:f", "no_such_module cannot be imported; install it"),
        ("tests.packaging.test_refused_models:leaves", "test_refused_models:leaves fails"),
        ("json:loads", "missing a required argument: 's'; name a function that takes no arg"),
        (
            "tests.packaging.test_refused_models:no_tuple",
            "returned Bare; let it return the module, a ModelInputs",
        ),
    ],
)
def test_a_wrong_factory_ends_with_2_and_one_line(
    factory: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.pt"
    assert main(["package-model", "--factory", factory, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize("sources", [[], [".", "--factory", "tests.packaging.user_models:dcn"]])
def test_a_run_or_a_factory_and_not_both(
    sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["package-model", *sources, "--out", str(tmp_path / "m.pt")]) == 2
    assert "give either RUN_OR_CHECKPOINT or --factory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--factory", "tests.packaging.user_models:dcn", "--no-evaluate"],
            "leave them out with --factory",
        ),
        (
            ["--factory", "tests.packaging.user_models:dcn", "--evaluate-rows", "9"],
            "leave them out with --factory",
        ),
        (["some_run", "--leaf-module", "Gate"], "--leaf-module is for a --factory's module"),
        (["some_run", "--sharding", "row_wise"], "sharding is for several shards; give --shards"),
        (["some_run", "--table-sharding", "a=row_wise"], "sharding is for several shards"),
        (
            ["--factory", "tests.packaging.user_models:tutorial", "--output-name", "x"],
            "names its outputs itself",
        ),
    ],
)
def test_flags_that_would_do_nothing_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["package-model", *arguments, "--out", str(tmp_path / "m.pt")]) == 2
    assert message in capsys.readouterr().err


def test_the_output_may_be_named_on_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "m.pt"
    arguments = [
        "--factory",
        "tests.packaging.user_models:wide",
        "--output-name",
        "ctr",
        "--out",
        str(out),
    ]
    assert main(["package-model", *arguments]) == 0
    assert [output.name for output in load_package(out).manifest.schema.outputs] == ["ctr"]


def test_a_rule_for_ids_that_the_module_hashes_is_refused(tmp_path: Path) -> None:
    module, _, sample = user_models.hashed()
    rules = {"hour": FeatureRule(rows=24), "user": FeatureRule(hashing="modulo")}
    with pytest.raises(UserError, match=r"'user'. has a rule, but the module's own FeatureHasher"):
        package_model(module, ModelInputs(features=rules), sample, out=tmp_path / "m.pt")


def raising() -> user_models.Source:
    raise RuntimeError("no checkpoint here\nand no more")


def test_a_factory_that_fails_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "m.pt")]
    assert main(["package-model", "--factory", f"{__name__}:raising", *out]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert f"{__file__}:" in error[0]
    assert "RuntimeError: no checkpoint here; correct it there" in error[0]
    (tmp_path / "unfinished_module.py").write_text("def made(:\n")
    monkeypatch.chdir(tmp_path)
    assert main(["package-model", "--factory", "unfinished_module:made", *out]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "unfinished_module:made fails: SyntaxError:" in line


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FeatureRule(hashing="md5"), "hashing is 'md5'; give one of none, modulo, murmur3"),
        (lambda: FeatureRule(out_of_range="drop"), "out_of_range is 'drop'; give one of reject"),
        (lambda: FeatureRule(rows=0), "rows is 0; give a whole number of 1 or more"),
        (lambda: ModelInputs(dense_missing="zero"), "dense_missing is 'zero'; give one of nan"),
        (lambda: ModelInputs(dense_features=["x", "y", "x"]), "dense_features has 'x' twice"),
    ],
)
def test_words_about_inputs_are_checked(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()


def test_tables_without_values_are_refused() -> None:
    module = user_models.Tutorial().to("meta")
    with pytest.raises(UserError, match="table 'product_table' is on the meta device"):
        make_servable((module, ModelInputs(), user_models.tutorial()[2]), PackageOptions(name="m"))


def test_a_module_of_another_dtype_is_told_the_layer() -> None:
    module, _, sample = user_models.positioned()
    with pytest.raises(UserError, match=r"over.weight is torch.float16; module.float\(\)"):
        make_servable((module.half(), ModelInputs(), sample), PackageOptions(name="m"))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"module": "path"}, "module is a str; give a torch.nn.Module"),
        ({"schema": {"features": {}}}, "schema is a dict; give a ModelInputs or None"),
        ({"sample_batch": None}, "sample_batch is a NoneType; give a tuple"),
        ({"shards": "2"}, "shards is '2'; give a whole number"),
        ({"version": 3}, "the model's version is 3; give letters"),
        ({"leaf_modules": "ebc_"}, r"leaf_modules is 'ebc_'; give a list, \['ebc_'\]"),
        ({"leaf_modules": ["ebc"]}, "leaf module 'ebc' is neither .* give one such as ebc_"),
        ({"leaf_modules": ["GRU"]}, "leaf module 'GRU' is neither .* give one such as ebc_"),
    ],
)
def test_arguments_of_another_kind_are_named(wrong: dict, words: str, tmp_path: Path) -> None:
    module, schema, sample = user_models.tutorial()
    given = {"module": module, "schema": schema, "sample_batch": sample, **wrong}
    with pytest.raises(UserError, match=words):
        package_model(**given, out=tmp_path / "m.pt")


def test_a_rule_that_is_a_word_is_refused() -> None:
    with pytest.raises(UserError, match=r"features\['a'\] is 'murmur3'; give a FeatureRule"):
        ModelInputs(features={"a": "murmur3"})


class FewPlaces(nn.Module):
    """Has 64 places, and takes a bag's length for one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection([user_models.table("a", ["a"])])
        self.places = nn.Embedding(64, 8)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return (self.tables(ids).values() * self.places(ids.lengths().long())).sum(dim=1)


def test_a_module_that_bags_of_2000_ids_break_is_refused() -> None:
    sample = (user_models.bags(["a"]),)
    with pytest.raises(UserError, match=r"fails on bags of 2000 ids at .*self.places\(.*cut long"):
        make_servable((FewPlaces(), ModelInputs(), sample), PackageOptions(name="m"))
