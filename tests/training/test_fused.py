"""Fused tables against plain loops, plain collections and torch's own optimizers."""

import copy
import re
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tessera.training import (
    CombinedOptimizer,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    KeyedOptimizerWrapper,
    ModelConfig,
    PoolingType,
    ShardingEnv,
    ShardingPlan,
    TableConfig,
    build_ranking_model,
    in_backward_optimizer_filter,
)
from tessera.training.distributed.model_parallel import get_module
from tessera.training.distributed.types import ParameterSharding
from tests.training.jagged_strategies import bags_of, quick
from tests.training.references import pooled_reference, row_gradients, update_reference

ROWS = {"x": 7, "y": 7, "z": 5, "u": 6}
TABLE_OF = {"x": "shared", "y": "shared", "z": "own", "u": "third"}
MEANS = {"z"}
KINDS = ["exact_sgd", "exact_adagrad", "exact_row_wise_adagrad"]


def collection(*, weighted=False, device=None):
    """A shared table, mixed sizes, both poolings, in an order that is not the features'."""
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(6, 12, name="third", feature_names=["u"]),
            EmbeddingBagConfig(5, 4, name="own", feature_names=["z"], pooling=PoolingType.MEAN),
            EmbeddingBagConfig(7, 8, name="shared", feature_names=["y", "x"]),
        ],
        is_weighted=weighted,
        device=device,
    )


def placements(**fields):
    return {name: ParameterSharding(**fields) for name in ("third", "own", "shared")}


def fuse(module, **fused_params):
    return DistributedModelParallel(module, sharders=[EmbeddingBagCollectionSharder(fused_params)])


@quick
@given(
    bags=bags_of(ROWS),
    weighted=st.booleans(),
    kind=st.sampled_from(KINDS),
    weight_decay=st.sampled_from([0.0, 0.3]),
)
def test_three_steps_equal_plain_loops(bags, weighted, kind, weight_decay):
    lr, eps = 0.1, 1e-3
    plain = collection(weighted=weighted)
    weights = {name: bag.weight.detach().clone() for name, bag in plain.embedding_bags.items()}
    shape = {
        "exact_sgd": lambda w: (0,),
        "exact_adagrad": lambda w: w.shape,
        "exact_row_wise_adagrad": lambda w: w.shape[:1],
    }[kind]
    states = {name: torch.zeros(shape(weight)) for name, weight in weights.items()}
    fused = fuse(plain, optimizer=kind, learning_rate=lr, eps=eps, weight_decay=weight_decay)
    kjt = bags.kjt(weighted=weighted)
    for _ in range(3):
        out = fused(kjt)
        grads = {key: torch.randn(bags.batch_size, out[key].size(1)) for key in ROWS}
        gradients = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        touched = {name: set() for name in weights}
        for key in ROWS:
            name = TABLE_OF[key]
            options = {
                "mean": key in MEANS,
                "weights": bags.weights[key] if weighted else None,
            }
            expected = pooled_reference(weights[name], bags.ids[key], **options)
            torch.testing.assert_close(out[key], expected, rtol=1e-4, atol=1e-5)
            own, rows = row_gradients(weights[name], bags.ids[key], grads[key], **options)
            gradients[name] += own
            touched[name] |= rows
        sum((out[key] * grads[key]).sum() for key in ROWS).backward()
        for name, weight in weights.items():
            update_reference(
                kind,
                weight,
                states[name],
                gradients[name],
                touched[name],
                lr=lr,
                eps=eps,
                weight_decay=weight_decay,
            )
    # float32 sums of at most some tens of terms in another order; an update divides them by the
    # root of their squares, which keeps the relative error.
    for name, weight in weights.items():
        found = fused.state_dict()[f"embedding_bags.{name}.weight"]
        torch.testing.assert_close(found, weight, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("exact_sgd", lambda params: torch.optim.SGD(params, lr=0.1)),
        ("exact_adagrad", lambda params: torch.optim.Adagrad(params, lr=0.1, eps=1e-3)),
    ],
)
def test_three_steps_of_a_whole_model_equal_torchs_optimizers(kind, optimizer):
    config = ModelConfig(
        embedding_dim=8,
        rows=30,
        tables={"b": TableConfig(pooling="mean"), "c": TableConfig(table="t_a")},
    )
    names = ["a", "b", "c"]
    plain = build_ranking_model(config, ["d0", "d1"], names)
    fused = fuse(copy.deepcopy(plain), optimizer=kind, learning_rate=0.1, eps=1e-3)
    dense = dict(in_backward_optimizer_filter(fused.named_parameters()))
    ours = CombinedOptimizer([fused.fused_optimizer, KeyedOptimizerWrapper(dense, optimizer)])
    theirs = optimizer(plain.parameters())
    for _ in range(3):
        lengths = torch.randint(0, 4, (24,), dtype=torch.int32)
        kjt = KeyedJaggedTensor(
            names, torch.randint(0, 10**12, (int(lengths.sum()),)), lengths=lengths
        )
        features, labels = torch.randn(8, 2), torch.randint(0, 2, (8,)).float()
        for model, optim in ((fused, ours), (plain, theirs)):
            optim.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(features, kjt), labels)
            loss.backward()
            optim.step()
    expected = plain.state_dict()
    assert fused.state_dict().keys() == expected.keys()
    # Three steps of size 0.1; float32 rounding (6e-8) grows through them by well under 1,000.
    for name, value in fused.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=5e-5, msg=name)


@pytest.mark.parametrize("mean", [False, True])
def test_per_sample_weights_get_their_gradient(mean):
    pooling = PoolingType.MEAN if mean else PoolingType.SUM
    config = EmbeddingBagConfig(5, 4, name="t", feature_names=["x"], pooling=pooling)
    plain = EmbeddingBagCollection([config], is_weighted=True)
    table = plain.embedding_bags["t"].weight.detach().clone()
    fused = fuse(plain, optimizer="exact_sgd", learning_rate=0.0)
    weights = torch.tensor([0.5, 2.0, 1.0], requires_grad=True)
    lengths = torch.tensor([2, 0, 1])
    fused(
        KeyedJaggedTensor(["x"], torch.tensor([1, 2, 4]), weights, lengths)
    ).values().sum().backward()
    expected = table[[1, 2, 4]].sum(1) / (torch.tensor([2.0, 2.0, 1.0]) if mean else 1.0)
    torch.testing.assert_close(weights.grad, expected)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_two_runs_give_the_same_bits(threads):
    torch.set_num_threads(threads)
    tables = []
    for _ in range(2):
        torch.manual_seed(3)
        ebc = EmbeddingBagCollection(
            [EmbeddingBagConfig(50, 64, name=f"t{i}", feature_names=[f"f{i}"]) for i in range(4)]
        )
        fused = fuse(ebc)
        for _ in range(5):
            lengths = torch.randint(0, 8, (4 * 256,))
            ids = torch.randint(0, 50, (int(lengths.sum()),))
            kjt = KeyedJaggedTensor([f"f{i}" for i in range(4)], ids, lengths=lengths)
            out = fused(kjt).values()
            (out * torch.randn_like(out)).sum().backward()
        tables.append(torch.cat([weight.flatten() for weight in fused.state_dict().values()]))
    assert torch.equal(*tables)


def test_a_feature_of_two_tables_is_looked_up_in_both():
    plain = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(4, 4, name="s", feature_names=["x"]),
            EmbeddingBagConfig(4, 4, name="t", feature_names=["x", "y"]),
        ]
    )
    kjt = KeyedJaggedTensor(["y", "x"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 0, 1, 1]))
    expected = plain(kjt)
    out = fuse(plain)(kjt)
    assert out.keys() == expected.keys() == ["x@s", "x@t", "y"]
    torch.testing.assert_close(out.values(), expected.values())


@pytest.mark.parametrize("dim", [4, 64])
@pytest.mark.parametrize("bad", [-1, -2, 7, 2**40])
def test_an_id_that_is_no_row_is_named(bad, dim):
    fused = fuse(
        EmbeddingBagCollection(
            [
                EmbeddingBagConfig(9, dim, name="first", feature_names=["a"]),
                EmbeddingBagConfig(7, dim, name="second", feature_names=["b"]),
            ]
        )
    )
    before = copy.deepcopy(fused.state_dict())
    kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([8, 6, bad]), lengths=torch.tensor([1, 2]))
    with pytest.raises(IndexError, match=f"feature 'b' has id {bad}, but table 'second' has rows"):
        fused(kjt)
    assert all(torch.equal(value, before[name]) for name, value in fused.state_dict().items())
    with pytest.raises(KeyError, match="feature 'b' is missing"):
        fused(kjt.permute([0]))


def test_values_that_are_no_ids_are_refused():
    kjt = KeyedJaggedTensor(list(ROWS), torch.tensor([3.5]), lengths=torch.tensor([1, 0, 0, 0]))
    model = build_ranking_model(ModelConfig(rows=9), [], list(ROWS))
    for refuses in (collection(), fuse(collection()), model.hasher):
        with pytest.raises(ValueError, match=r"dtype torch.float32; ids are int32 or int64"):
            refuses(kjt)


def test_tensors_with_gaps_in_memory_are_looked_up_alike():
    plain = collection(weighted=True)
    expected_of = copy.deepcopy(plain)
    kjt = KeyedJaggedTensor(
        list(ROWS),
        torch.tensor([3, 9, 1, 9])[::2],
        torch.tensor([2.0, 9.0, 0.5, 9.0])[::2],
        offsets=torch.tensor([0, 9, 1, 9, 1, 9, 1, 9, 2])[::2],
    )
    torch.testing.assert_close(fuse(plain)(kjt).values(), expected_of(kjt).values())


def test_a_new_learning_rate_holds_from_the_next_forward_on():
    fused = fuse(collection(), optimizer="exact_sgd", learning_rate=1.0)
    optimizer = fused.fused_optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    kjt = KeyedJaggedTensor(list(ROWS), torch.tensor([3]), lengths=torch.tensor([1, 0, 0, 0]))
    row = fused.state_dict()["embedding_bags.shared.weight"][3]
    for expected in (1.0, 0.5, 0.25):
        before = row.clone()
        fused(kjt)["x"].sum().backward()
        optimizer.step()
        scheduler.step()
        torch.testing.assert_close(before - row, torch.full_like(row, expected))


def test_a_new_eps_holds_from_the_next_forward_on():
    fused = fuse(collection(), learning_rate=1.0)
    fused.fused_optimizer.param_groups[0]["eps"] = 1e6
    kjt = KeyedJaggedTensor(list(ROWS), torch.tensor([3]), lengths=torch.tensor([1, 0, 0, 0]))
    row = fused.state_dict()["embedding_bags.shared.weight"][3]
    before = row.clone()
    fused(kjt)["x"].sum().backward()
    # A gradient of ones over (1 + eps) instead of over 1.
    torch.testing.assert_close(before - row, torch.full_like(row, 1e-6), rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [False, True])
def test_inference_mode_looks_up_and_training_goes_on_after_it(kind, weighted):
    plain = collection(weighted=weighted)
    expected_of = copy.deepcopy(plain)
    fused = fuse(plain, optimizer=kind, learning_rate=1.0)

    def features():
        weights = torch.tensor([2.0, 0.5]) if weighted else None
        return KeyedJaggedTensor(
            list(ROWS), torch.tensor([3, 1]), weights, torch.tensor([1, 0, 0, 1])
        )

    with torch.inference_mode():
        found = fused(features()).values()
        torch.testing.assert_close(found, expected_of(features()).values())
    before = copy.deepcopy(fused.state_dict())
    fused(features()).values().sum().backward()
    assert not torch.equal(
        fused.state_dict()["embedding_bags.shared.weight"], before["embedding_bags.shared.weight"]
    )


def test_lookups_without_gradients_change_nothing():
    fused = fuse(collection(), learning_rate=1.0)
    before = copy.deepcopy(fused.state_dict())
    kjt = KeyedJaggedTensor(list(ROWS), torch.tensor([3]), lengths=torch.tensor([1, 0, 0, 0]))
    with torch.no_grad():
        assert not fused(kjt).values().requires_grad
    assert all(torch.equal(value, before[name]) for name, value in fused.state_dict().items())


def steps(model, optimizer, kjts):
    outs = []
    for kjt in kjts:
        out = model(kjt).values()
        (out * out + out).sum().backward()
        optimizer.step()
        outs.append(out.detach().clone())
    return outs


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_carry_a_run_on_bit_by_bit(kind, tmp_path):
    kjts = [
        KeyedJaggedTensor(list(ROWS), torch.randint(0, 5, (8,)), lengths=torch.full((8,), 1))
        for _ in range(6)
    ]
    whole = fuse(collection(), optimizer=kind, learning_rate=0.2)
    optimizer = whole.fused_optimizer
    steps(whole, optimizer, kjts[:3])
    optimizer.param_groups[0]["lr"] = 0.1
    path = tmp_path / "state.pt"
    torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, path)
    expected = steps(whole, optimizer, kjts[3:])
    saved = torch.load(path, weights_only=True)
    resumed = fuse(collection(device="meta"), optimizer=kind, learning_rate=0.7)
    resumed.load_state_dict(saved["model"])
    resumed_optimizer = resumed.fused_optimizer
    resumed_optimizer.load_state_dict(saved["optimizer"])
    found = steps(resumed, resumed_optimizer, kjts[3:])
    assert all(map(torch.equal, found, expected))


def test_plain_and_fused_collections_share_state_dicts():
    plain = collection()
    fused = fuse(collection())
    assert fused.state_dict().keys() == plain.state_dict().keys()
    fused.load_state_dict(plain.state_dict())
    kjt = KeyedJaggedTensor(list(ROWS), torch.tensor([3, 1]), lengths=torch.tensor([1, 0, 1, 0]))
    torch.testing.assert_close(fused(kjt).values(), plain(kjt).values())
    with pytest.raises(RuntimeError, match="Missing key"):
        fused.load_state_dict({})
    with pytest.raises(ValueError, match="give False"):
        fused.load_state_dict(plain.state_dict(), assign=True)


def test_a_model_on_the_meta_device_gets_memory_and_first_values():
    torch.manual_seed(1)
    fused = fuse(nn.Sequential(collection(device="meta"), nn.Linear(2, 2, device="meta")))
    assert not any(parameter.is_meta for parameter in fused.parameters())
    weight = fused.state_dict()["0.embedding_bags.own.weight"]
    assert 0 < float(weight.abs().max()) <= 5**-0.5
    left = DistributedModelParallel(nn.Linear(2, 2, device="meta"), init_parameters=False)
    assert all(parameter.is_meta for parameter in left.parameters())


def test_only_the_dense_parameters_are_left_for_the_user():
    fused = fuse(nn.ModuleDict({"tables": collection(), "top": nn.Linear(2, 1)}))
    left = [name for name, _ in in_backward_optimizer_filter(fused.named_parameters())]
    assert left == ["top.weight", "top.bias"]
    marked = [name for name, _ in in_backward_optimizer_filter(fused.named_parameters(), True)]
    assert marked == [f"tables.embedding_bags.{name}.weight" for name in ("third", "own", "shared")]


def test_a_plan_chooses_which_collections_are_fused():
    model = nn.ModuleDict({"a": collection(), "b": collection()})
    tables = {name: ParameterSharding() for name in ("third", "own", "shared")}
    dmp = DistributedModelParallel(model, plan=ShardingPlan({"a": tables}))
    assert type(dmp.module["b"]) is EmbeddingBagCollection
    assert len(dmp.fused_optimizer.params) == 3
    assert re.search(r"own +\| table_wise +\| fused +\| ", str(dmp.plan))
    whole = DistributedModelParallel(nn.ModuleDict({"a": collection()}))
    assert list(whole.plan.plan["a"]) == ["third", "own", "shared"]
    assert get_module(whole) is whole.module


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"c": {}}, "names module 'c'; the model's shardable modules are"),
        ({"a": {}}, r"places tables \[\], the module has \['own', 'shared', 'third'\]"),
        ({"a": placements(ranks=[1])}, "a shard at rank:1/cpu; there are ranks 0 to 0"),
        ({"a": placements(sharding_type="row_wise")}, "the plan has no list of shards"),
        (
            {"a": placements(sharding_type="rowwise")},
            r"sharding_type is 'rowwise'; give one of data_parallel, .*; did you mean row_wise\?",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        DistributedModelParallel(nn.ModuleDict({"a": collection()}), plan=ShardingPlan(plan))


@pytest.mark.parametrize(
    ("fused_params", "message"),
    [
        ({"lr": 0.1}, "has key 'lr'; it knows optimizer, learning_rate, eps, weight_decay"),
        ({"optimizer": "shampoo"}, "optimizer is 'shampoo'; give one of exact_sgd"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0; give 0 or more"),
        ({"eps": float("nan")}, "eps is nan"),
    ],
)
def test_optimizers_that_do_not_exist_are_refused(fused_params, message):
    with pytest.raises(ValueError, match=message):
        EmbeddingBagCollectionSharder(fused_params)


def test_more_than_one_rank_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="world_size is 2"):
        DistributedModelParallel(collection(), env=ShardingEnv.from_local(2, 0))
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="world_size is 3"):
        DistributedModelParallel(collection())
    with pytest.raises(ValueError, match="rank is 2 in a world of 2"):
        ShardingEnv.from_local(2, 2)


def test_an_environment_is_read_from_a_process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
        assert (env.world_size, env.rank) == (1, 0)
        kjt = KeyedJaggedTensor(list(ROWS), torch.tensor([3]), lengths=torch.tensor([1, 0, 0, 0]))
        assert DistributedModelParallel(collection(), env=env)(kjt).values().shape == (1, 32)
    finally:
        torch.distributed.destroy_process_group()


def test_what_would_cut_the_tables_from_their_operator_is_refused():
    fused = fuse(collection())
    with pytest.raises(ValueError, match="cannot be deep-copied"):
        copy.deepcopy(fused)
    with pytest.raises(ValueError, match="stay float32 on cpu"):
        fused.double()
    with pytest.raises(ValueError, match="tables are trained on cpu or cuda"):
        DistributedModelParallel(collection(), device=torch.device("meta"))
    assert fused.float() is fused


def test_a_data_parallel_wrapper_is_called_once():
    class Wrapper:
        calls = 0

        def wrap(self, dmp, env, device):
            self.calls += 1
            dmp._dmp_wrapped_module = nn.Sequential(dmp.module)

    wrapper = Wrapper()
    dmp = DistributedModelParallel(
        collection(), init_data_parallel=False, data_parallel_wrapper=wrapper
    )
    assert wrapper.calls == 0
    dmp.init_data_parallel()
    dmp.init_data_parallel()
    assert wrapper.calls == 1
    assert next(iter(dmp.state_dict())).startswith("0.embedding_bags.")


def test_a_model_without_tables_has_no_fused_optimizer():
    dmp = DistributedModelParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no fused tables"):
        _ = dmp.fused_optimizer


def test_building_tables_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fuse(collection())


def test_dense_tables_are_left_for_the_users_optimizer():
    plain = collection()
    expected_of = copy.deepcopy(plain)
    plan = ShardingPlan({"": placements(compute_kernel="dense")})
    dmp = DistributedModelParallel(plain, plan=plan)
    kjt = KeyedJaggedTensor(list(ROWS), torch.tensor([3, 1]), lengths=torch.tensor([1, 0, 0, 1]))
    left = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    assert left.keys() == dict(expected_of.named_parameters()).keys()
    for model, params in ((dmp, left.values()), (expected_of, expected_of.parameters())):
        optimizer = torch.optim.Adam(params, lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(kjt).values().square().sum().backward()
            optimizer.step()
    for name, value in expected_of.state_dict().items():
        torch.testing.assert_close(dmp.state_dict()[name], value)
