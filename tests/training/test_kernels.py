"""Kernels against nn.EmbeddingBag's gradients and optimizers written out a row at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.errors import UserError
from tessera.training import KeyedJaggedTensor
from tessera.training.distributed.batched_embedding_kernel import (
    BatchedDenseEmbedding,
    BatchedDenseEmbeddingBag,
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)
from tessera.training.distributed.embedding_types import EmbeddingComputeKernel
from tessera.training.distributed.plan.plan_types import ShardingType
from tessera.training.distributed.tables.kernels.row_sparse import RowSparseTables
from tessera.training.distributed.tables.kernels.tbe import TbeTables
from tessera.training.modules.embedding_configs import DataType
from tessera.training.optim.optimizers import in_backward_optimizer_filter
from tests.training.kernel_cases import DEVICE, Double, group
from tests.training.optimizer_reference import STATES

KINDS = list(STATES)
on_gpu = pytest.mark.gpu if DEVICE.type == "cuda" else lambda test: test


def draw_bags(generator, config, batch_size, *, weighted, most=4):
    """Feature to (bags, weights); some bags are empty, some ids repeat."""
    jagged = {}
    for table in config.embedding_tables:
        for name in table.feature_names:
            sizes = torch.randint(0, most, (batch_size,), generator=generator).tolist()
            bags = [
                torch.randint(0, table.local_rows, (size,), generator=generator).tolist()
                for size in sizes
            ]
            weights = [torch.rand(size, generator=generator).tolist() for size in sizes]
            jagged[name] = (bags, weights if weighted else None)
    return jagged


def kjt_of(jagged, device=DEVICE):
    bags = [bag for own, _ in jagged.values() for bag in own]
    weighted = next(iter(jagged.values()))[1] is not None
    return KeyedJaggedTensor(
        list(jagged),
        torch.tensor([row for bag in bags for row in bag], dtype=torch.int64),
        weights=(
            torch.tensor([w for _, weights in jagged.values() for own in weights for w in own])
            if weighted
            else None
        ),
        lengths=torch.tensor([len(bag) for bag in bags], dtype=torch.int64),
    ).to(device)


def fill(kernel, generator):
    with torch.no_grad():
        for weight in kernel.split_embedding_weights():
            weight.copy_(torch.randn(weight.shape, generator=generator))


def check_three_steps(kernel, double, draw, *, generator, bound, **hyper):
    for _ in range(3):
        jagged = draw()
        out, expected = kernel(kjt_of(jagged)), double.forward(jagged)
        torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=bound)
        grad = torch.randn(out.shape, generator=generator)
        (out * grad.to(out.device)).sum().backward()
        if expected.requires_grad and expected.numel():
            (expected * grad.double()).sum().backward()
        double.update(**hyper)
        kernel.flush()
        for found, wanted in zip(kernel.split_embedding_weights(), double.weights, strict=True):
            torch.testing.assert_close(found.cpu().double(), wanted, rtol=0, atol=bound)


def compared(
    kind,
    tables,
    *,
    pooled,
    mean,
    weighted,
    batch_size,
    seed,
    compute=EmbeddingComputeKernel.FUSED,
    storage=(),
    **params,
):
    """Three steps of a fused kernel and its double; returns the kernel."""
    generator = torch.Generator().manual_seed(seed)
    config = group(
        tables,
        mean=mean,
        weighted=weighted,
        kernel=compute,
        optimizer=kind,
        learning_rate=0.05,
        eps=1e-3,
        **params,
        **dict(storage),
    )
    kernel = (BatchedFusedEmbeddingBag if pooled else BatchedFusedEmbedding)(config, device=DEVICE)
    fill(kernel, generator)
    kernel.purge()
    double = Double(config, kernel.split_embedding_weights(), pooled=pooled, kind=kind)
    hyper = {"lr": 0.05, "eps": 1e-3, **params}
    hyper["l2"] = hyper.pop("weight_decay_mode", "") == "l2"
    # float32 sums of some tens of terms of size 1 (rounding 6e-8 each), divided by no less than
    # eps = 1e-3 and scaled by lr = 0.05, three times.  Lion's sign is the exception: it is drawn
    # from continuous gradients, so none is near enough to 0 to turn.
    check_three_steps(
        kernel,
        double,
        lambda: draw_bags(generator, config, batch_size, weighted=weighted),
        generator=generator,
        bound=1e-4,
        **hyper,
    )
    return kernel


@on_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("pooled", "mean", "weighted"),
    [
        (True, False, False),
        (True, True, False),
        (True, False, True),
        (True, True, True),
        (False, False, False),
    ],
    ids=["sum", "mean", "weighted", "weighted-mean", "unpooled"],
)
def test_three_steps_equal_the_double(kind, pooled, mean, weighted):
    tables = [(7, 8, 2), (5, 4 if pooled else 8, 1), (9, 8, 1)]
    compared(kind, tables, pooled=pooled, mean=mean, weighted=weighted, batch_size=6, seed=1)


@on_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_batch_without_bags_is_a_step(kind, weighted):
    generator = torch.Generator().manual_seed(4)
    config = group(
        [(7, 8, 2), (5, 4, 1)], weighted=weighted, optimizer=kind, learning_rate=0.05, eps=1e-3
    )
    kernel = BatchedFusedEmbeddingBag(config, device=DEVICE)
    fill(kernel, generator)
    double = Double(config, kernel.split_embedding_weights(), pooled=True, kind=kind)
    sizes = iter([4, 0, 4])
    check_three_steps(
        kernel,
        double,
        lambda: draw_bags(generator, config, next(sizes), weighted=weighted),
        generator=generator,
        bound=1e-4,  # as in `compared`
        lr=0.05,
        eps=1e-3,
    )


@on_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["decouple", "l2"])
def test_weight_decay_of_both_kinds(kind, mode):
    compared(
        kind,
        [(7, 8, 2), (5, 12, 1)],
        pooled=True,
        mean=False,
        weighted=False,
        batch_size=6,
        seed=2,
        weight_decay=0.3,
        weight_decay_mode=mode,
    )


@on_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_length_are_taken(kind):
    compared(
        kind, [(7, 6, 1), (5, 1, 2)], pooled=True, mean=True, weighted=False, batch_size=5, seed=3
    )


@on_gpu
@pytest.mark.parametrize(
    ("kind", "settings_"),
    [
        ("adam", {"beta1": 0.5, "beta2": 0.7}),
        ("partial_row_wise_lamb", {"beta1": 0.0, "beta2": 0.5}),
        ("lion", {"beta1": 0.6, "beta2": 0.3}),
        ("lars_sgd", {"momentum": 0.4, "eta": 0.2}),
    ],
)
def test_settings_reach_the_update(kind, settings_):
    compared(
        kind,
        [(7, 8, 2)],
        pooled=True,
        mean=False,
        weighted=False,
        batch_size=6,
        seed=4,
        **settings_,
    )


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="set TESSERA_TEST_DEVICE=cuda on a GPU host")
@pytest.mark.parametrize("kind", ["exact_sgd", "exact_row_wise_adagrad", "adam"])
@pytest.mark.parametrize(
    ("compute", "storage"),
    [
        (EmbeddingComputeKernel.FUSED_UVM, {}),
        # A cache of fewer rows than a batch has, and one of more.
        (EmbeddingComputeKernel.FUSED_UVM_CACHING, {"cache_load_factor": 0.05}),
        (
            EmbeddingComputeKernel.FUSED_UVM_CACHING,
            {"cache_load_factor": 0.9, "cache_algorithm": "lfu"},
        ),
    ],
    ids=["uvm", "small-cache", "large-cache"],
)
def test_rows_in_host_memory(kind, compute, storage):
    compared(
        kind,
        [(300, 8, 2), (200, 16, 1)],
        pooled=True,
        mean=False,
        weighted=True,
        batch_size=40,
        seed=7,
        compute=compute,
        storage=tuple(storage.items()),
    )


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="set TESSERA_TEST_DEVICE=cuda on a GPU host")
def test_a_batch_without_bags_takes_no_turn_of_the_cache():
    generator = torch.Generator().manual_seed(5)
    config = group(
        [(40, 8, 2), (30, 4, 1)],
        kernel=EmbeddingComputeKernel.FUSED_UVM_CACHING,
        optimizer="exact_sgd",
        learning_rate=0.05,
        cache_load_factor=0.5,
    )
    kernel = BatchedFusedEmbeddingBag(config, device=DEVICE)
    fill(kernel, generator)
    kernel.purge()
    double = Double(config, kernel.split_embedding_weights(), pooled=True, kind="exact_sgd")
    sizes = iter([4, 0, 4])

    def prefetched():
        jagged = draw_bags(generator, config, next(sizes), weighted=False)
        kernel.prefetch(kjt_of(jagged))
        return jagged

    check_three_steps(
        kernel, double, prefetched, generator=generator, bound=1e-4, lr=0.05, eps=1e-3
    )


@on_gpu
@settings(max_examples=12)
@given(
    kind=st.sampled_from(KINDS),
    tables=st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([2, 4, 8]), st.integers(1, 3)),
        min_size=1,
        max_size=4,
    ),
    pooled=st.booleans(),
    mean=st.booleans(),
    weighted=st.booleans(),
    batch_size=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_random_groups(*, kind, tables, pooled, mean, weighted, batch_size, seed):
    if not pooled:
        tables = [(rows, tables[0][1], features) for rows, _, features in tables]
        mean = weighted = False
    compared(
        kind,
        tables,
        pooled=pooled,
        mean=mean,
        weighted=weighted,
        batch_size=batch_size,
        seed=seed,
    )


def test_fbgemm_serves_what_it_can():
    for kind in KINDS:
        kernel = BatchedFusedEmbeddingBag(group([(5, 8, 1)], optimizer=kind), device=DEVICE)
        on_device = 3 if DEVICE.type == "cpu" else 8
        assert isinstance(kernel._tables, TbeTables) == (KINDS.index(kind) < on_device), kind
    decayed = group([(5, 8, 1)], optimizer="exact_sgd", weight_decay=0.1)
    assert isinstance(BatchedFusedEmbeddingBag(decayed)._tables, RowSparseTables)


@on_gpu
@pytest.mark.parametrize("kind", ["exact_sgd", "exact_row_wise_adagrad", "adam", "lion"])
@pytest.mark.parametrize("pooled", [True, False])
def test_a_batch_that_varies_per_feature(kind, pooled):
    generator = torch.Generator().manual_seed(5)
    config = group([(7, 8, 2), (5, 8 if not pooled else 4, 1)], optimizer=kind, learning_rate=0.05)
    kernel = (BatchedFusedEmbeddingBag if pooled else BatchedFusedEmbedding)(config, device=DEVICE)
    fill(kernel, generator)
    strides = [[2, 1], [0, 3], [1, 0]]
    double = Double(config, kernel.split_embedding_weights(), pooled=pooled, kind=kind)
    for _ in range(2):
        jagged = {}
        for (name, table), own in zip(
            [(n, t) for t in config.embedding_tables for n in t.feature_names], strides, strict=True
        ):
            sizes = torch.randint(0, 4, (sum(own),), generator=generator).tolist()
            rows = [torch.randint(0, table.local_rows, (s,), generator=generator) for s in sizes]
            jagged[name] = ([bag.tolist() for bag in rows], None)
        bags = [bag for own, _ in jagged.values() for bag in own]
        kjt = KeyedJaggedTensor(
            list(jagged),
            torch.tensor([row for bag in bags for row in bag], dtype=torch.int64),
            lengths=torch.tensor([len(bag) for bag in bags]),
            stride_per_key_per_rank=strides,
        ).to(DEVICE)
        out = kernel(kjt)
        # The double looks up feature by feature; a batch of its own each.
        expected = by_rank_and_feature(double, jagged, strides, pooled=pooled)
        torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)
        grad = torch.randn(out.shape, generator=generator)
        (out * grad.to(out.device)).sum().backward()
        (expected * grad.double()).sum().backward()
        double.update(lr=0.05)
        for found, wanted in zip(kernel.split_embedding_weights(), double.weights, strict=True):
            # Default eps of 1e-8: a first update is of size lr whatever the gradient's rounding.
            torch.testing.assert_close(found.cpu().double(), wanted, rtol=0, atol=1e-4)


def by_rank_and_feature(double, jagged, strides, *, pooled):
    double.leaves = [weight.clone().requires_grad_() for weight in double.weights]
    double.touched = [set() for _ in double.weights]
    found = []
    for index, (table, leaf) in enumerate(
        zip(double.config.embedding_tables, double.leaves, strict=True)
    ):
        for name in table.feature_names:
            bags, weights = jagged[name]
            found.append(double._look_up(leaf, bags, weights))
            double.touched[index].update(row for bag in bags for row in bag)
    if not pooled:
        return torch.cat(found)
    pieces = []
    for rank in range(len(strides[0])):
        for vectors, own in zip(found, strides, strict=True):
            start = sum(own[:rank])
            pieces.append(vectors[start : start + own[rank]].reshape(-1))
    return torch.cat(pieces)


@on_gpu
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_dense_tables_have_the_doubles_gradients(pooled, mean, weighted):
    generator = torch.Generator().manual_seed(6)
    config = group(
        [(7, 8, 2), (5, 3 if pooled else 8, 1)],
        mean=mean,
        weighted=weighted,
        kernel=EmbeddingComputeKernel.DENSE,
    )
    kernel = (BatchedDenseEmbeddingBag if pooled else BatchedDenseEmbedding)(config, device=DEVICE)
    fill(kernel, generator)
    double = Double(config, kernel.split_embedding_weights(), pooled=pooled, kind="exact_sgd")
    jagged = draw_bags(generator, config, 5, weighted=weighted and pooled)
    if weighted and not pooled:
        with pytest.raises(ValueError, match="no weights"):
            kernel(kjt_of(jagged))
        return
    out, expected = kernel(kjt_of(jagged)), double.forward(jagged)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn(out.shape, generator=generator)
    (out * grad.to(out.device)).sum().backward()
    (expected * grad.double()).sum().backward()
    names = dict(kernel.named_parameters_by_table())
    assert list(names) == ["t0", "t1"]
    assert [name for name, _ in kernel.named_parameters()] == ["t0/t1.weight"]
    for parameter, leaf in zip(names.values(), double.leaves, strict=True):
        torch.testing.assert_close(parameter.grad.cpu().double(), leaf.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["exact_adagrad", "adam", "lion"])
def test_gradients_are_clipped_number_by_number(kind):
    config = group([(4, 4, 1)], optimizer=kind, learning_rate=0.1, max_gradient=0.5)
    kernel = BatchedFusedEmbeddingBag(config, device=DEVICE)
    double = Double(config, kernel.split_embedding_weights(), pooled=True, kind=kind)
    jagged = {"f0_0": ([[1, 2], [1]], None)}
    out, expected = kernel(kjt_of(jagged)), double.forward(jagged)
    grad = torch.tensor([[9.0, -9.0, 0.1, -0.2], [0.3, -0.1, 7.0, -7.0]])
    (out * grad.to(DEVICE)).sum().backward()
    (expected * grad.clamp(-0.5, 0.5).double()).sum().backward()
    double.update(lr=0.1)
    found = kernel.split_embedding_weights()[0]
    torch.testing.assert_close(found.cpu().double(), double.weights[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["lamb", "partial_row_wise_lamb", "lars_sgd"])
def test_rows_without_a_gradient_stay_numbers(kind):
    # On a GPU FBGEMM's own operators give not-a-number here.
    kernel = BatchedFusedEmbeddingBag(group([(4, 4, 1)], optimizer=kind))
    fill(kernel, torch.Generator().manual_seed(0))
    before = kernel.split_embedding_weights()[0].clone()
    (kernel(kjt_of({"f0_0": ([[1]], None)}, "cpu")) * 0.0).sum().backward()
    assert torch.equal(kernel.split_embedding_weights()[0], before)


@pytest.mark.parametrize("kind", ["exact_sgd", "adam"])
@pytest.mark.parametrize("mean", [True, False])
def test_weights_of_ids_get_their_gradient(kind, mean):
    config = group([(5, 4, 1)], mean=mean, weighted=True, optimizer=kind, learning_rate=0.0)
    kernel = BatchedFusedEmbeddingBag(config)
    fill(kernel, torch.Generator().manual_seed(0))
    table = kernel.split_embedding_weights()[0].clone()
    weights = torch.tensor([0.5, 2.0, 1.0], requires_grad=True)
    kjt = KeyedJaggedTensor(["f0_0"], torch.tensor([1, 2, 4]), weights, torch.tensor([2, 0, 1]))
    grad = torch.tensor([[1.0, 2.0, 3.0, 4.0], [9.0] * 4, [-1.0, 0.0, 1.0, 2.0]])
    (kernel(kjt) * grad).sum().backward()
    expected = (table[[1, 2, 4]] * grad[[0, 0, 2]]).sum(1)
    torch.testing.assert_close(
        weights.grad, expected / (torch.tensor([2.0, 2.0, 1.0]) if mean else 1.0)
    )


@on_gpu
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("optimizer", ["exact_sgd", "adam", None])
def test_weights_of_ids_of_any_float_type(optimizer, dtype, mean):
    fused = {} if optimizer is None else {"optimizer": optimizer, "learning_rate": 0.1}
    config = group([(5, 4, 1)], weighted=True, mean=mean, **fused)
    kernel = (BatchedFusedEmbeddingBag if fused else BatchedDenseEmbeddingBag)(
        config, device=DEVICE
    )
    fill(kernel, torch.Generator().manual_seed(0))
    table = kernel.split_embedding_weights()[0].clone()
    weights = torch.tensor([0.5, 2.0, 4.0], dtype=dtype, device=DEVICE, requires_grad=True)
    features = KeyedJaggedTensor(
        ["f0_0"],
        torch.tensor([1, 2, 3], device=DEVICE),
        weights=weights,
        lengths=torch.tensor([2, 1], device=DEVICE),
    )
    pooled = kernel(features)
    expected = torch.stack([0.5 * table[1] + 2 * table[2], 4 * table[3]])
    expected[0] /= 2 if mean else 1
    torch.testing.assert_close(pooled, expected)
    pooled.sum().backward()
    assert weights.grad.dtype is dtype
    of_weights = table[1:4].sum(dim=1) / torch.tensor([2, 2, 1] if mean else [1, 1, 1]).to(DEVICE)
    torch.testing.assert_close(weights.grad, of_weights.to(dtype), rtol=2**-10, atol=2**-10)


@pytest.mark.parametrize("kind", ["exact_sgd", "adam", "lion"])
@pytest.mark.parametrize("bad", [-1, 6, 2**40])
def test_an_id_that_is_no_row_is_named_and_nothing_changes(kind, bad):
    kernel = BatchedFusedEmbeddingBag(group([(9, 4, 1), (6, 4, 1)], optimizer=kind))
    kjt = kjt_of({"f0_0": ([[8]], None), "f1_0": ([[bad]], None)}, "cpu")
    before = [weight.clone() for weight in kernel.split_embedding_weights()]
    with pytest.raises(IndexError, match=f"feature 'f1_0' has id {bad}, but table 't1' has rows"):
        kernel(kjt)
    assert all(map(torch.equal, before, kernel.split_embedding_weights()))


def test_an_ignored_id_takes_row_0_and_the_callers_ids_stay():
    config = group([(3, 4, 1), (2, 4, 1)], optimizer="adam", bounds_check_mode="ignore")
    kernel = BatchedFusedEmbeddingBag(config)
    fill(kernel, torch.Generator().manual_seed(0))
    kjt = kjt_of({"f0_0": ([[7]], None), "f1_0": ([[1]], None)}, "cpu")
    out = kernel(kjt)
    first, second = kernel.split_embedding_weights()
    assert torch.equal(out.detach(), torch.cat([first[:1], second[1:]], dim=1))
    assert kjt.values().tolist() == [7, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_lookups_without_gradients_change_nothing(kind):
    kernel = BatchedFusedEmbeddingBag(group([(5, 4, 1)], optimizer=kind), device=DEVICE)
    fill(kernel, torch.Generator().manual_seed(0))
    kjt = kjt_of({"f0_0": ([[1, 2], [1]], None)})
    with torch.no_grad():
        assert not kernel(kjt).requires_grad
    with torch.inference_mode():
        kernel(kjt)
    state = kernel.fused_optimizer.state_dict()["state"]["t0.weight"]
    assert all(int(value.sum()) == 0 for value in state.values())
    kernel(kjt).sum().backward()
    if "step" in state:
        assert int(state["step"]) == 1


@on_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_state_carries_a_run_on_bit_by_bit(kind):
    generator = torch.Generator().manual_seed(0)
    config = group([(7, 8, 1), (6, 8, 1)], optimizer=kind, learning_rate=0.1)
    batches = [kjt_of(draw_bags(generator, config, 4, weighted=False)) for _ in range(5)]

    def run(kernel, kjts):
        for kjt in kjts:
            out = kernel(kjt)
            (out * out + out).sum().backward()
        return torch.cat([weight.flatten() for weight in kernel.split_embedding_weights()])

    whole = BatchedFusedEmbeddingBag(config, device=DEVICE)
    fill(whole, generator)
    run(whole, batches[:3])
    whole.fused_optimizer.param_groups[0]["lr"] = 0.3
    resumed = BatchedFusedEmbeddingBag(config, device=DEVICE)
    for there, here in zip(
        whole.split_embedding_weights(), resumed.split_embedding_weights(), strict=True
    ):
        here.copy_(there)
    resumed.fused_optimizer.load_state_dict(whole.fused_optimizer.state_dict())
    assert torch.equal(run(resumed, batches[3:]), run(whole, batches[3:]))


def test_shards_are_parameters_for_the_tables_optimizer_alone():
    kernel = BatchedFusedEmbeddingBag(group([(5, 4, 1), (6, 4, 1)]))
    assert [name for name, _ in kernel.named_parameters("top")] == [
        "top.t0.weight",
        "top.t1.weight",
    ]
    assert list(in_backward_optimizer_filter(kernel.named_parameters())) == []
    assert list(kernel.state_dict()) == []
    assert list(kernel.fused_optimizer.params) == ["t0.weight", "t1.weight"]
    names = [name for name, _ in kernel.named_split_embedding_weights()]
    assert names == ["t0", "t1"]


def test_first_values_are_the_tables():
    config = group([(50, 4, 1), (8, 4, 1)])
    config.embedding_tables[1].init_fn = lambda weight: weight.fill_(3.0)
    kernel = BatchedFusedEmbeddingBag(config)
    kernel.init_parameters()
    first, second = kernel.split_embedding_weights()
    assert 0 < float(first.abs().max()) <= 50**-0.5
    assert bool((second == 3.0).all())


@pytest.mark.parametrize("kernel", [EmbeddingComputeKernel.FUSED, EmbeddingComputeKernel.DENSE])
def test_half_precision_tables(kernel):
    config = group([(5, 8, 1)], kernel=kernel, data_type=DataType.FP16)
    if kernel is EmbeddingComputeKernel.FUSED:
        config.fused_params = {"optimizer": "exact_sgd", "learning_rate": 0.5}
        made = BatchedFusedEmbeddingBag(config)
    else:
        made = BatchedDenseEmbeddingBag(config)
    fill(made, torch.Generator().manual_seed(0))
    weight = made.split_embedding_weights()[0]
    assert weight.dtype is torch.float16
    before = weight.clone()
    out = made(kjt_of({"f0_0": ([[1, 2]], None)}, "cpu"))
    torch.testing.assert_close(
        out[0].float(), before[1].float() + before[2].float(), atol=2e-3, rtol=0
    )
    out.float().sum().backward()
    if kernel is EmbeddingComputeKernel.FUSED:
        torch.testing.assert_close(weight[1], before[1] - 0.5, atol=2e-3, rtol=0)
    else:
        assert bool((dict(made.named_parameters_by_table())["t0"].grad[1] == 1).all())


@pytest.mark.parametrize("kind", ["exact_sgd", "adam"])
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_vectors_are_given_in_the_dtype_asked_for(kind, name):
    config = group([(5, 8, 1)], optimizer=kind, output_dtype=name, learning_rate=0.5)
    kernel = BatchedFusedEmbeddingBag(config)
    fill(kernel, torch.Generator().manual_seed(0))
    before = kernel.split_embedding_weights()[0].clone()
    out = kernel(kjt_of({"f0_0": ([[1]], None)}, "cpu"))
    assert out.dtype is {"fp16": torch.float16, "bf16": torch.bfloat16}[name]
    torch.testing.assert_close(out[0].float(), before[1], atol=2e-2, rtol=0)
    out.sum().backward()
    assert not torch.equal(kernel.split_embedding_weights()[0], before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: group([(5, 8, 1)], kernel=EmbeddingComputeKernel.FUSED_UVM), "needs a GPU"),
        (
            lambda: group([(5, 8, 1)], kernel=EmbeddingComputeKernel.DENSE),
            "fused tables: compute_kernel is 'dense'; give one of fused",
        ),
        (lambda: group([(5, 8, 1)], cache_load_factor=0.5), "cache_load_factor is for GPUs"),
        (lambda: group([(5, 8, 1)], data_type=DataType.INT8), "data_type is INT8"),
        (
            lambda: group([(5, 8, 1)], data_type=DataType.FP16, optimizer="adam"),
            "FBGEMM does not serve on cpu are FP32",
        ),
    ],
)
def test_what_a_cpu_cannot_do_is_refused_by_name(make, message):
    with pytest.raises(UserError, match=message):
        BatchedFusedEmbeddingBag(make())


def test_groups_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="replicas that each update themselves drift apart"):
        BatchedFusedEmbeddingBag(group([(5, 8, 1)]), sharding_type=ShardingType.DATA_PARALLEL)
    with pytest.raises(ValueError, match=r"different row lengths \[8, 4\]"):
        BatchedFusedEmbedding(group([(5, 8, 1), (5, 4, 1)]))
    doubled = group([(5, 8, 1), (5, 8, 1)])
    doubled.embedding_tables[1].name = "t0"
    with pytest.raises(ValueError, match="'t0' is in one kernel twice"):
        BatchedFusedEmbeddingBag(doubled)


def test_weight_decay_that_comes_later_is_refused_where_it_would_do_nothing():
    kernel = BatchedFusedEmbeddingBag(group([(5, 8, 1)], optimizer="exact_sgd"))
    kernel.fused_optimizer.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(
        ValueError, match=r"weight_decay is 0\.1, but these tables were built without"
    ):
        kernel(kjt_of({"f0_0": ([[1]], None)}, "cpu"))
