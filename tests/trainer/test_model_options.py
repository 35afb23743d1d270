"""First-order, pairwise and concatenated terms, dimensions from cardinality, against plain formulas."""

import itertools

import pytest
import torch

from tessera.errors import UserError
from tessera.training import KeyedJaggedTensor, ModelConfig, TableConfig, build_ranking_model
from tessera.training.config import load_config
from tessera.training.models.config import auto_dim
from tessera.training.trained import load_trained
from tessera.training.trainer import train
from tests.trainer.shop import ITEMS, write_config

SHARED = TableConfig(table="item_table")
SEQUENCES = {"tables": {"item": SHARED, "history": SHARED}, "sequence_length": 3}
CONFIGS = {
    "dlrm": {},
    "dlrm_dcn": {},
    "din": {"attention": {"history": "item"}, **SEQUENCES},
    "sasrec": {"sequence": "history", "candidate": "item", **SEQUENCES},
    "mmoe": {},
    "ple": {},
}
NAMES = ["user", "item", "history"]
ROWS = 9
BAGS = [  # by sample, by feature
    [[3], [12], [5, 1, 5]],
    [[], [4], []],
    [[7], [2], [8, 0]],
    [[1], [0], [6, 2, 3, 4]],
]


def build(arch, labels=("a", "b"), **options):
    torch.manual_seed(0)
    fields = {"embedding_dim": 4, "rows": ROWS, "hashing": "modulo", "embedding_init": 0.5}
    config = ModelConfig(arch=arch, **{**fields, **CONFIGS[arch], **options})
    return build_ranking_model(config, ["x", "y"], NAMES, labels=labels).eval()


def batch():
    lengths = [len(sample[place]) for place in range(3) for sample in BAGS]
    values = [i for place in range(3) for sample in BAGS for i in sample[place]]
    kjt = KeyedJaggedTensor(
        NAMES, torch.tensor(values), lengths=torch.tensor(lengths, dtype=torch.int32)
    )
    return torch.tensor([[0.5, 1.0], [float("nan"), 2.0], [0.0, -1.0], [3.0, 0.0]]), kjt


def beside(plain, model):
    """Give ``model`` the weights that ``plain`` has too, and random first-order ones."""
    lacking = model.load_state_dict(plain.state_dict(), strict=False).missing_keys
    for name, parameter in model.named_parameters():
        if "first_order" in name:
            with torch.no_grad():
                parameter.copy_(torch.randn_like(parameter))
    return lacking


def tables_of(collection):
    """A plain lookup of one feature's id: ``(feature, id) -> [D]``."""
    bags = getattr(collection, "embedding_bags", None) or collection.embeddings
    configs = (
        collection.embedding_bag_configs()
        if hasattr(collection, "embedding_bags")
        else collection.embedding_configs()
    )
    weights = {f: bags[config.name].weight for config in configs for f in config.feature_names}
    return lambda feature, i: weights[feature][i % ROWS]


def first_order(model, dense):
    """By sample and label, the sum of the weights of what the sample holds."""
    part = model.arch.terms.first_order
    weight = tables_of(part.embedding_bag_collection)
    sums = model.encoder(dense, len(BAGS)) @ part.dense.weight.T
    return torch.stack(
        [
            sum(
                (weight(name, i) for name, bag in zip(NAMES, bags, strict=True) for i in bag),
                start=sums[sample],
            )
            for sample, bags in enumerate(BAGS)
        ]
    )


def looked_up(model):
    """By sample, the vectors of the features, bags summed; a sequence's vector by a hook."""
    arch, found = model.arch, {}
    if not hasattr(arch, "lookups"):
        vector = tables_of(arch.sparse_arch.embedding_bag_collection)
        return lambda: [
            [
                sum((vector(n, i) for i in bag), start=torch.zeros(4))
                for n, bag in zip(NAMES, bags, strict=True)
            ]
            for bags in BAGS
        ]
    state = arch.transformer if hasattr(arch, "transformer") else arch.attention[0]
    state.register_forward_hook(lambda *given: found.update(state=given[2]))
    user = tables_of(arch.lookups.embedding_bag_collection)
    item = tables_of(arch.lookups.embedding_collection)
    return lambda: [
        [
            sum((user("user", i) for i in bags[0]), start=torch.zeros(4)),
            item("item", bags[1][0]),
            found["state"][sample],
        ]
        for sample, bags in enumerate(BAGS)
    ]


@torch.no_grad()
@pytest.mark.parametrize("labels", [("a",), ("a", "b"), ("a", "b", "c")], ids=len)
@pytest.mark.parametrize("arch", CONFIGS)
def test_terms_are_added_to_the_logits_by_their_formulas(arch, labels):
    plain, model = build(arch, labels), build(arch, labels, first_order=True, fm=True)
    lacking = beside(plain, model)
    assert {name.split(".")[1] for name in lacking} == {"terms"}
    vectors = looked_up(model)
    dense, kjt = batch()
    found = model(dense, kjt).reshape(len(BAGS), -1) - plain(dense, kjt).reshape(len(BAGS), -1)
    own = []
    if hasattr(model.arch, "dense_arch"):
        own = [model.arch.dense_arch(model.encoder(dense, len(BAGS)))]
    pairs = [
        sum(a @ b for a, b in itertools.combinations([*(one[s] for one in own), *vs], 2))
        for s, vs in enumerate(vectors())
    ]
    expected = first_order(model, dense) + torch.stack(pairs)[:, None]
    assert expected.abs().min() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_first_order_weights_are_each_features_own_and_summed():
    options = {"tables": SEQUENCES["tables"], "pooling": "mean"}
    plain = build("dlrm", **options)
    model = build("dlrm", first_order=True, **options)
    beside(plain, model)
    configs = model.arch.terms.first_order.embedding_bag_collection.embedding_bag_configs()
    assert [config.feature_names for config in configs] == [["user"], ["item"], ["history"]]
    dense, kjt = batch()
    found = model(dense, kjt) - plain(dense, kjt)
    torch.testing.assert_close(found, first_order(model, dense), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("arch", ["dlrm", "dlrm_dcn"])
def test_concatenation_gives_the_top_mlp_the_vectors(arch):
    model = build(arch, concat=True)
    dense, kjt = batch()
    vectors = looked_up(model)()
    flat = torch.stack([torch.cat(sample) for sample in vectors])
    own = model.arch.dense_arch(model.encoder(dense, len(BAGS)))
    interaction = model.arch.inter_arch(own, flat.reshape(len(BAGS), 3, 4))
    parts = [interaction, flat] if arch == "dlrm" else [interaction, own, flat]
    expected = model.arch.over_arch(torch.cat(parts, dim=1))
    torch.testing.assert_close(model(dense, kjt), expected, rtol=1e-5, atol=1e-6)


def test_pairs_need_one_dimension(tmp_path):
    tables = {"item": TableConfig(dim=8)}
    with pytest.raises(
        UserError, match=r"fm=True: .* of the bottom MLP is 4 and that of item is 8;"
    ):
        build("dlrm_dcn", fm=True, tables=tables)
    with pytest.raises(UserError, match=r"that of user is 4 and that of item is 8; give all"):
        build("mmoe", fm=True, tables=tables)
    build("mmoe", first_order=True, tables=tables)
    config = write_config(tmp_path / "a.yaml", "mmoe", model=["concat: true"])
    with pytest.raises(UserError, match=r"arch mmoe has no such key, dlrm and dlrm_dcn have"):
        load_config(config)


@pytest.mark.parametrize(
    ("rows", "dim"),
    # 6 * rows ** 0.25: 6, 12, 18 -> 20, 33.7 -> 36, 60, 64.3 -> 64
    [(1, 8), (16, 12), (81, 20), (1000, 36), (10_000, 60), (13_200, 64), (10**9, 64)],
)
def test_automatic_dimensions(rows, dim):
    assert auto_dim(rows) == dim


def test_automatic_dimensions_follow_each_tables_rows():
    tables = {"user": TableConfig(rows=10_000), "item": TableConfig(rows=16, dim=8)}
    model = build("dlrm_dcn", embedding_dim="auto", tables=tables)
    assert [feature.dim for feature in model.features] == [60, 8, 12]
    assert model.arch.dense_arch.model(torch.zeros(1, 4)).shape == (1, 60)
    dense, kjt = batch()
    assert model(dense, kjt).shape == (4, 2)
    one = build("ple", tables={"user": TableConfig(rows=81, dim="auto")})
    assert [feature.dim for feature in one.features] == [20, 4, 4]


@pytest.mark.parametrize(
    ("arch", "fields", "message"),
    [
        ("dlrm", {"embedding_dim": "auto"}, "embedding_dim is auto; arch dlrm needs one size"),
        ("dlrm", {"tables": {"user": TableConfig(dim="auto")}}, "tables.user.dim is auto but"),
        ("mmoe", {"embedding_dim": "big"}, "embedding_dim='big': give a number or auto"),
        (
            "din",
            {
                "tables": {
                    **SEQUENCES["tables"],
                    **dict.fromkeys(("user", "seen"), TableConfig(table="users", rows=81)),
                },
                "attention": {"history": "item", "seen": "user"},
                "embedding_dim": "auto",
            },
            "tables of sequences need one embedding dimension, but that of user is 20",
        ),
    ],
)
def test_dimensions_that_do_not_fit_are_refused(arch, fields, message):
    names = [*NAMES, *(name for name in fields.get("tables", {}) if name not in NAMES)]
    given = {"embedding_dim": 4, "rows": ROWS, **CONFIGS[arch], **fields}
    with pytest.raises(UserError, match=message):
        build_ranking_model(ModelConfig(arch=arch, **given), ["x"], names)


def test_a_run_with_all_of_them_trains_resumes_and_loads(tmp_path):
    lines = ["first_order: true", "fm: false", "concat: true", "batch_norm: true"]
    path = write_config(tmp_path / "a.yaml", "dlrm_dcn", labels=("clicked", "spent"), model=lines)
    changes = ["model.embedding_dim=auto", "train.metric=log_loss", "model.embedding_dropout=0.1"]
    changes += ["train.schedule.kind=linear", "train.first_order_optimizer.learning_rate=0.1"]
    config = load_config(path, changes)
    whole = train(config, tmp_path / "whole", progress=False)
    steps = iter(range(100))
    cut = tmp_path / "cut"
    assert train(config, cut, progress=False, should_stop=lambda: next(steps) > 12).final is None
    again = train(config, cut, resume=True, progress=False)
    timed = "evaluation_samples_per_second"
    assert {**again.final, timed: 0} == {**whole.final, timed: 0}
    model = load_trained(whole.folder).model
    assert [feature.dim for feature in model.features] == [auto_dim(40), auto_dim(30), auto_dim(30)]
    tables = model.arch.terms.first_order.embedding_bag_collection.embedding_bags
    weights = tables["first_order_item_table_of_history"].weight
    assert weights.shape == (30, 2)
    assert (weights.abs().sum(dim=0) > 0).all()


def test_dropped_numbers_are_zero_and_the_others_scaled():
    model = build("dlrm", embedding_dropout=0.25).train()
    plain = looked_up(model)()
    _, kjt = batch()
    torch.manual_seed(3)
    seen = torch.stack([model.arch.sparse_arch(model.hasher(kjt)) for _ in range(200)])
    whole = torch.stack([torch.stack(sample) for sample in plain]).expand_as(seen)
    dropped = (seen == 0) & (whole != 0)
    torch.testing.assert_close(seen[~dropped], whole[~dropped] / 0.75)
    # 8,800 draws of a chance of 1/4: within five standard errors.
    share = dropped.sum() / (whole != 0).sum()
    assert abs(float(share) - 0.25) < 5 * (0.25 * 0.75 / 8800) ** 0.5


def test_l2_shrinks_the_rows_of_a_batch_and_no_others(tmp_path):
    def rows_after(name, rate, decay):
        """The rows of the items' table after one step of SGD over the whole data."""
        path = write_config(tmp_path / f"{name}.yaml", "dlrm")
        changes = {
            "train.batch_size": 1000,
            "train.epochs": 1,
            "train.embedding_optimizer.name": "sgd",
            "train.embedding_optimizer.learning_rate": rate,
            "train.embedding_optimizer.weight_decay": decay,
            "model.tables.item.hashing": "none",
            "model.tables.history.hashing": "none",
        }
        lines = [f"{key}={value}" for key, value in changes.items()]
        run = train(load_config(path, lines), tmp_path / name, progress=False)
        (weights,) = [
            value
            for name, value in load_trained(run.folder).model.named_parameters()
            if name.endswith("item_table.weight")
        ]
        return weights

    once, twice = rows_after("once", 1.0, 0.0), rows_after("twice", 2.0, 0.0)
    decayed = rows_after("decayed", 1.0, 0.5)
    before = 2 * once - twice  # SGD: each is the first value less rate times gradient
    met = torch.arange(30) < ITEMS
    torch.testing.assert_close(decayed[met], (once - 0.5 * before)[met], rtol=1e-4, atol=1e-6)
    assert torch.equal(decayed[~met], once[~met])
    assert torch.equal(twice[~met], once[~met])
    assert not torch.equal(once[met], before[met])


def test_first_order_weights_may_have_an_optimizer_of_their_own(tmp_path):
    def weights_after(name, epochs, optimizer):
        """The history's first-order weights after so many steps over the whole data, and the items' vectors."""
        path = write_config(tmp_path / f"{name}.yaml", "dlrm", model=["first_order: true"])
        sgd = "{name: sgd, learning_rate: 1.0}"
        lines = ["train.batch_size=1000", f"train.epochs={epochs}"]
        lines += [f"train.embedding_optimizer={sgd}", f"train.first_order_optimizer={optimizer}"]
        run = train(load_config(path, lines), tmp_path / name, progress=False)
        model = load_trained(run.folder).model
        tables = model.arch.terms.first_order.embedding_bag_collection.embedding_bags
        vectors = model.arch.sparse_arch.embedding_bag_collection.embedding_bags["item_table"]
        return tables["first_order_item_table_of_history"].weight, vectors.weight

    alike, vectors = weights_after("alike", 1, "null")
    once, same = weights_after("once", 1, "{name: sgd, learning_rate: 3.0}")
    assert torch.equal(same, vectors)
    met = alike[:, 0] != 0
    assert met.any()
    torch.testing.assert_close(once, 3 * alike)
    adagrad, _ = weights_after("adagrad", 1, "{name: adagrad, learning_rate: 0.5}")
    torch.testing.assert_close(adagrad, 0.5 * alike.sign(), rtol=1e-4, atol=1e-6)
    twice, _ = weights_after("twice", 2, "{name: sgd, learning_rate: 3.0}")
    decayed, _ = weights_after("decayed", 2, "{name: sgd, learning_rate: 3.0, weight_decay: 0.1}")
    # The first step begins at 0, the second shrinks what the first has made.
    torch.testing.assert_close(decayed, twice - 3.0 * 0.1 * once, rtol=1e-4, atol=1e-6)


def test_an_optimizer_of_first_order_weights_needs_some(tmp_path):
    path = write_config(tmp_path / "a.yaml", "dlrm")
    config = load_config(path, ["train.first_order_optimizer.learning_rate=0.1"])
    message = (
        "first_order_optimizer is given, but the model has no first-order weights; set model.f"
    )
    with pytest.raises(UserError, match=message):
        train(config, tmp_path / "run", progress=False)
