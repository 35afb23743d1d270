import itertools
import math

import pytest
import torch
from torch import nn

from tessera.errors import UserError
from tessera.kernels import ops
from tessera.training import (
    DLRM,
    DLRM_DCN,
    DLRMTrain,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    ModelConfig,
    TableConfig,
    build_ranking_model,
)
from tessera.training.conversion.content import Content
from tessera.training.conversion.convert import converted
from tessera.training.models.dlrm import InteractionArch
from tessera.training.models.ranking import MissingValueEncoder
from tessera.training.modules.batch_norm import BatchNorm
from tessera.training.modules.crossnet import LowRankCrossNet
from tessera.training.modules.dot_interaction import DotInteraction, NarrowInteraction
from tessera.training.modules.mlp import MLP, Perceptron

NAMES = ["a", "b", "c", "d"]
TABLES = {
    "a": TableConfig(hashing="modulo", rows=20),
    "b": TableConfig(hashing="none", out_of_range="hash", pooling="mean"),
    "c": TableConfig(table="t_a", rows=20, hashing="none"),
}


def random_kjt(batch_size, *, dtype=torch.int64, names=NAMES):
    lengths = torch.randint(0, 4, (len(names) * batch_size,), dtype=torch.int32)
    values = torch.randint(-(2**31), 2**31, (int(lengths.sum()),)).to(dtype)
    return KeyedJaggedTensor(names, values, lengths=lengths)


def collection(dims=(4, 4)):
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(10, dim, name=f"t{i}", feature_names=[f"f{i}"])
            for i, dim in enumerate(dims)
        ]
    )


@pytest.mark.parametrize("batch_size", [0, 1, 5])
@pytest.mark.parametrize("features", [1, 2, 6])
def test_dot_interaction_and_its_gradient_equal_a_plain_loop(batch_size, features):
    x = torch.randn(batch_size, features, 3, dtype=torch.float64, requires_grad=True)
    dots = DotInteraction(features)(x)
    pairs = [(i, j) for i in range(features) for j in range(i)]
    expected = [(x[:, i] * x[:, j]).sum(1) for i, j in pairs]
    expected = torch.stack(expected, dim=1) if pairs else x.new_zeros(batch_size, 0)
    torch.testing.assert_close(dots, expected)
    torch.testing.assert_close(DotInteraction(features)(x.detach()), expected)
    weight = torch.randn_like(expected)
    ours = torch.autograd.grad((dots * weight).sum(), x)[0]
    theirs = torch.autograd.grad((expected * weight).sum() + 0 * x.sum(), x)[0]
    torch.testing.assert_close(ours, theirs)


def test_torchrecs_weights_are_put_in_our_order_of_pairs():
    features, dim = 4, 3
    dense, sparse = torch.randn(5, dim), torch.randn(5, features, dim)
    vectors = torch.cat([dense[:, None], sparse], dim=1)
    rows, columns = torch.triu_indices(features + 1, features + 1, offset=1)
    # As TorchRec has it.
    theirs = torch.cat([dense, (vectors @ vectors.mT)[:, rows, columns]], dim=1)
    name = "over_arch.model.0._mlp.0._linear.weight"
    weight = torch.randn(6, theirs.size(1))
    state = {
        name: weight,
        "dense_arch.model._mlp.0._linear.weight": torch.randn(dim, 2),
        "sparse_arch.embedding_bag_collection.embedding_bags.t.weight": torch.randn(7, dim),
    }
    ours = converted(Content(model=state), "tessera")[0].model
    torch.testing.assert_close(
        InteractionArch(features)(dense, sparse) @ ours[name].T, theirs @ weight.T
    )


def test_dot_interaction_trains_under_autocast():
    x = torch.randn(4, 3, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dots = DotInteraction(3)(x)
    dots.sum().backward()
    assert dots.dtype == torch.bfloat16
    # Each vector's gradient is the sum of the other two, multiplied in float32.
    torch.testing.assert_close(x.grad, x.detach().sum(1, keepdim=True) - x.detach())


def test_dot_interaction_of_narrow_numbers():
    """Five vectors are given three of zeros."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-4, 5, (6, 5, 16), generator=generator).bfloat16().requires_grad_()
    wide = x.detach().double().requires_grad_()
    interaction = DotInteraction(5)
    # Whole numbers: every sum is exact but for its rounding to bfloat16 at the end.
    dots = torch.bmm(wide, wide.mT).flatten(1).index_select(1, interaction.pairs_P)
    grad = torch.randint(-2, 3, dots.shape, generator=generator)
    found = interaction(x)
    found.backward(grad.bfloat16())
    dots.backward(grad.double())
    assert torch.equal(found, dots.bfloat16())
    assert torch.equal(x.grad, wide.grad.bfloat16())


@pytest.mark.parametrize("batch_size", [1, 9])
def test_the_narrow_interaction_is_the_same_and_so_its_gradient(batch_size):
    """By the operators that a GPU's kernels are tested against."""
    ops.load()
    generator = torch.Generator().manual_seed(batch_size)
    shapes = [(batch_size, 8), (batch_size, 3, 8)]
    narrow = [
        torch.randint(-4, 5, shape, generator=generator).bfloat16().requires_grad_()
        for shape in shapes
    ]
    wide = [x.detach().double().requires_grad_() for x in narrow]
    assert not NarrowInteraction.takes(*narrow)  # on a CPU
    found, expected = NarrowInteraction.apply(*narrow), InteractionArch(3)(*wide)
    grad = torch.randint(-2, 3, expected.shape, generator=generator)
    found.backward(grad.bfloat16())
    expected.backward(grad.double())
    assert torch.equal(found, expected.bfloat16())
    for own, other in zip(narrow, wide, strict=True):
        assert torch.equal(own.grad, other.grad.bfloat16())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_takes_narrow_vectors_of_whole_16_bytes():
    dense, sparse = torch.ones(2, 16, device="cuda"), torch.ones(2, 3, 16, device="cuda")
    arch = InteractionArch(3)
    assert arch.is_one_kernel(dense.bfloat16(), sparse.bfloat16())
    assert not arch.is_one_kernel(dense, sparse)
    assert not arch.is_one_kernel(dense.bfloat16()[:, :12], sparse.bfloat16()[..., :12])
    # Vectors that lie apart, and a gradient that begins anywhere.
    vectors = torch.randn(1, 5, 16, device="cuda").bfloat16().requires_grad_()
    found = arch(vectors[:, 1], vectors[:, 2:])
    wide = vectors.detach().double().cpu().requires_grad_()
    expected = arch(wide[:, 1], wide[:, 2:])
    torch.testing.assert_close(found.double().cpu(), expected, rtol=2**-7, atol=2**-6)
    found[:, 1:].sum().backward()
    expected[:, 1:].sum().backward()
    torch.testing.assert_close(vectors.grad.double().cpu(), wide.grad, rtol=2**-7, atol=2**-5)


def test_the_cross_network_is_its_equation():
    net = LowRankCrossNet(5, num_layers=2, low_rank=3)
    x_0 = torch.randn(4, 5)
    x = x_0
    for v, w in zip(net._v, net._w, strict=True):
        x = x_0 * ((x @ v.weight.T) @ w.weight.T + w.bias) + x
    torch.testing.assert_close(net(x_0), x)
    with pytest.raises(ValueError, match="at least 1"):
        LowRankCrossNet(5, num_layers=0)


def test_an_mlp_is_linear_layers_with_activations():
    mlp = MLP(3, [4, 2], activation="sigmoid")
    x = torch.randn(5, 3)
    first, second = (layer._linear for layer in mlp._mlp)
    torch.testing.assert_close(mlp(x), torch.sigmoid(second(torch.sigmoid(first(x)))))
    linear = Perceptron(3, 2, bias=False, activation="none")
    torch.testing.assert_close(linear(x), x @ linear._linear.weight.T)
    with pytest.raises(ValueError, match="activation is 'gelo'"):
        MLP(3, [4], activation="gelo")
    with pytest.raises(ValueError, match="layer_sizes is empty"):
        MLP(3, [])


def test_dropout_works_while_training_only():
    mlp = MLP(3, [1000], dropout=0.5)
    x = torch.ones(1, 3)
    kept = mlp.eval()(x) != 0
    share = float((mlp.train()(x) != 0)[kept].float().mean())
    # About 500 kept-or-dropped outcomes: 0.35 to 0.65 is over 6 standard deviations.
    assert 0.35 < share < 0.65
    assert torch.equal(mlp.eval()(x), mlp(x))


def test_dlrm_puts_its_parts_together():
    model = DLRM(collection(), 3, [8, 4], [16, 1])
    dense = torch.randn(5, 3)
    ids = torch.randint(0, 10, (10,))
    kjt = KeyedJaggedTensor(["f1", "f0"], ids, lengths=torch.ones(10, dtype=torch.int32))
    bags = model.sparse_arch.embedding_bag_collection.embedding_bags
    bottom = model.dense_arch(dense)
    e0, e1 = bags["t0"].weight[ids[5:]], bags["t1"].weight[ids[:5]]
    dots = [(p * q).sum(1, keepdim=True) for p, q in ((e0, bottom), (e1, bottom), (e1, e0))]
    expected = model.over_arch(torch.cat([bottom, *dots], dim=1))
    torch.testing.assert_close(model(dense, kjt), expected)


def test_dlrm_dcn_crosses_everything_side_by_side_and_takes_mixed_sizes():
    model = DLRM_DCN(collection((4, 6)), 3, [8, 5], [16, 1], dcn_num_layers=2, dcn_low_rank_dim=3)
    dense = torch.randn(5, 3)
    ids = torch.randint(0, 10, (10,))
    kjt = KeyedJaggedTensor(["f0", "f1"], ids, lengths=torch.ones(10, dtype=torch.int32))
    bags = model.sparse_arch.embedding_bag_collection.embedding_bags
    stacked = torch.cat(
        [model.dense_arch(dense), bags["t0"].weight[ids[:5]], bags["t1"].weight[ids[5:]]], dim=1
    )
    torch.testing.assert_close(
        model(dense, kjt), model.over_arch(model.inter_arch.crossnet(stacked))
    )


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"last dense_arch_layer_size is 5; it must be .* 4"):
        DLRM(collection(), 3, [8, 5], [16, 1])
    with pytest.raises(ValueError, match=r"different embedding_dims \[4, 6\]"):
        DLRM(collection((4, 6)), 3, [8, 4], [16, 1])
    with pytest.raises(ValueError, match="at least one hidden layer"):
        DLRM(collection(), 3, [8, 4], [1])


def test_the_training_wrapper_gives_the_loss_of_the_logits():
    class Batch:
        dense_features = torch.randn(5, 3)
        sparse_features = KeyedJaggedTensor(
            ["f0", "f1"], torch.randint(0, 10, (10,)), lengths=torch.ones(10, dtype=torch.int32)
        )
        labels = torch.tensor([0, 1, 1, 0, 1])

    model = DLRM(collection(), 3, [8, 4], [16, 1])
    loss, (again, logits, labels) = DLRMTrain(model)(Batch())
    p = torch.sigmoid(model(Batch.dense_features, Batch.sparse_features).squeeze(1)).tolist()
    expected = -sum(
        math.log(q if y else 1 - q) for q, y in zip(p, Batch.labels.tolist(), strict=True)
    ) / len(p)
    assert float(again) == pytest.approx(expected, rel=1e-5)
    assert torch.equal(again, loss)
    assert loss.requires_grad
    assert not logits.requires_grad
    assert torch.equal(labels, Batch.labels)


def test_missing_dense_values_are_told_from_zeros():
    dense = torch.tensor([[1.5, math.nan], [0.0, -2.0]])
    encoder = MissingValueEncoder(2, "indicator")
    assert encoder.out_features == 4
    assert encoder(dense, 2).tolist() == [[1.5, 0, 0, 1], [0, -2, 0, 0]]
    assert MissingValueEncoder(2, "zero")(dense, 2).tolist() == [[1.5, 0], [0, -2]]
    assert MissingValueEncoder(0, "indicator")(torch.zeros(3, 0), 3).tolist() == [[1], [1], [1]]


class Served(nn.Module):
    """Builds the keyed tensor inside the forward, as a packaged model does."""

    def __init__(self, model, names):
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, dense, lengths, values):
        return self.model(dense, KeyedJaggedTensor(self.names, values, lengths=lengths))


@pytest.mark.parametrize("arch", ["dlrm", "dlrm_dcn"])
@pytest.mark.parametrize("dense_count", [0, 3])
def test_a_traced_and_scripted_model_scores_any_batch_size(arch, dense_count):
    config = ModelConfig(arch=arch, embedding_dim=8, rows=50, tables=TABLES)
    names = [f"d{i}" for i in range(dense_count)]
    model = Served(build_ranking_model(config, names, NAMES).eval(), NAMES)
    traced = torch.fx.symbolic_trace(model)
    scripted = torch.jit.script(traced)
    sizes = itertools.product([3, 1, 0, 17], [torch.int32, torch.int64])
    for batch_size, dtype in sizes:
        kjt = random_kjt(batch_size, dtype=dtype)
        dense = torch.randn(batch_size, dense_count)
        dense[dense > 1] = math.nan
        expected = model.model(dense, kjt)
        assert expected.shape == (batch_size,)
        assert not expected.isnan().any()
        assert torch.equal(traced(dense, kjt.lengths(), kjt.values()), expected)
        assert torch.equal(scripted(dense, kjt.lengths(), kjt.values()), expected)
    empty = torch.zeros(8, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
    assert torch.equal(traced(dense[:2], *empty), model(dense[:2], *empty))


def test_permuted_features_are_traced_too():
    model = build_ranking_model(ModelConfig(embedding_dim=4, rows=9), ["d"], ["b", "a"]).eval()
    traced = torch.fx.symbolic_trace(Served(model, ["a", "b"]))
    for batch_size in (2, 5):
        kjt = random_kjt(batch_size, names=["a", "b"])
        dense = torch.randn(batch_size, 1)
        assert torch.equal(traced(dense, kjt.lengths(), kjt.values()), model(dense, kjt))


def test_a_sample_scores_the_same_in_any_batch():
    model = build_ranking_model(
        ModelConfig(embedding_dim=8, rows=50, tables=TABLES), ["x"], NAMES
    ).eval()
    kjt, dense = random_kjt(6), torch.randn(6, 1)
    whole = model(dense, kjt)
    for sample in range(6):
        bags = [kjt[name].to_dense()[sample] for name in NAMES]
        one = KeyedJaggedTensor(
            NAMES, torch.cat(bags), lengths=torch.tensor([len(bag) for bag in bags])
        )
        # Matrix products of other shapes add in another order.
        torch.testing.assert_close(
            model(dense[sample : sample + 1], one), whole[sample : sample + 1]
        )


def test_features_are_settled_for_the_package():
    model = build_ranking_model(
        ModelConfig(
            embedding_dim=8,
            rows=50,
            tables={**TABLES, "d": TableConfig(weighted=True, out_of_range="reject")},
        ),
        [],
        NAMES,
    )
    defaults = {"group": "id_list", "dim": 8, "pooling": "sum", "out_of_range": "clamp"}
    assert [vars(feature) for feature in model.features] == [
        {**defaults, "name": "a", "table": "t_a", "rows": 20, "hashing": "modulo"},
        {
            **defaults,
            "name": "b",
            "table": "t_b",
            "rows": 50,
            "hashing": "none",
            "pooling": "mean",
            "out_of_range": "hash",
        },
        {**defaults, "name": "c", "table": "t_a", "rows": 20, "hashing": "none"},
        {
            **defaults,
            "name": "d",
            "group": "id_score_list",
            "table": "t_d",
            "rows": 50,
            "hashing": "murmur3",
            "out_of_range": "reject",
        },
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"arch": "dlmr"},
            "arch is 'dlmr'; give one of custom, deepfm, din, dlrm, .*; did you mean dlrm",
        ),
        ({"embedding_dim": 0}, "embedding_dim=0"),
        ({"over_layers": ()}, "over_layers is empty"),
        ({"dense_layers": (8, 0)}, "dense_layers=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"embedding_init": -1.0}, "embedding_init=-1.0"),
        ({"hashing": "md5"}, "hashing='md5'"),
        ({"tables": {"a": TableConfig(dim=9)}}, "tables.a.dim is 9 but embedding_dim is 16"),
    ],
)
def test_configs_that_make_no_model_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        ModelConfig(**fields)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"z": TableConfig()}, "tables.z: the data has no such feature; it has a, b"),
        (
            {"a": TableConfig(table="t", rows=5), "b": TableConfig(table="t", rows=6)},
            "features a and b share table 't' but have rows 5 and 6",
        ),
    ],
)
def test_configs_that_do_not_fit_the_data_are_refused(tables, message):
    with pytest.raises(UserError, match=message):
        build_ranking_model(ModelConfig(tables=tables), [], ["a", "b"])


def test_a_model_needs_a_sparse_feature():
    with pytest.raises(UserError, match="no sparse features"):
        build_ranking_model(ModelConfig(), ["d"], [])


@pytest.mark.parametrize("arch", ["dlrm", "dlrm_dcn"])
def test_a_model_names_its_logit_layers_and_its_collections(arch):
    model = build_ranking_model(ModelConfig(arch=arch, rows=10), ["x"], ["a"]).eval()
    assert list(model.collections()) == ["arch.sparse_arch.embedding_bag_collection"]
    (name,) = model.logit_layers()
    outputs = []
    model.get_submodule(name).register_forward_hook(lambda _, __, output: outputs.append(output))
    scores = model(torch.randn(3, 1), random_kjt(3, names=["a"]))
    assert torch.equal(outputs[0].squeeze(1), scores)


@pytest.mark.parametrize("arch", ["dlrm", "dlrm_dcn", "deepfm", "mmoe", "ple", "din", "sasrec"])
def test_embedding_dropout_and_batch_norm_are_of_training_alone(arch):
    shared = TableConfig(rows=30, table="shared_table")
    fields = {
        "din": {"attention": {"b": "a"}},
        "sasrec": {"sequence": "b", "candidate": "a"},
    }.get(arch, {})
    config = ModelConfig(
        arch=arch,
        embedding_dim=4,
        rows=30,
        embedding_init=1.0,
        tables={"a": shared, "b": shared},
        embedding_dropout=0.5,
        batch_norm=True,
        **fields,
    )
    torch.manual_seed(0)
    model = build_ranking_model(config, ["x"], ["a", "b"])
    norms = [part for part in model.modules() if isinstance(part, BatchNorm)]
    assert norms
    ids = KeyedJaggedTensor(["a", "b"], torch.arange(16), lengths=torch.ones(16, dtype=torch.int32))
    dense = torch.randn(8, 1)
    assert not torch.equal(model(dense, ids), model(dense, ids))  # other numbers are dropped
    assert all(norm.running_mean.abs().sum() > 0 for norm in norms)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    assert torch.equal(model(dense, ids), model(dense, ids))
    alone = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([0, 8]), lengths=torch.ones(2, dtype=torch.int32)
    )
    torch.testing.assert_close(model(dense[:1], alone), model(dense, ids)[:1])
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for layers in (part for part in model.modules() if isinstance(part, nn.Dropout)):
        assert layers.p in {0.0, 0.5}
