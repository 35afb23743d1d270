"""A whole model on ranks: its losses and weights are those of one rank."""

import copy

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.nn.parallel import DistributedDataParallel

from tessera.training import (
    DLRM,
    CombinedOptimizer,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    KeyedOptimizerWrapper,
    PoolingType,
    ShardingPlan,
    in_backward_optimizer_filter,
)
from tessera.training.distributed import sharding_plan
from tessera.training.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    get_module,
    get_unwrapped_module,
)
from tests.training.ranks import rank_device, run_on_ranks, whole_on_each_rank
from tests.training.sharded_cases import placed

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")

ROWS = {"a": 40, "b": 7, "c": 23}
STEPS, LR, EPS, DIM, DENSE = 4, 0.05, 1e-2, 8, 5
PATH = "sparse_arch.embedding_bag_collection"

PLANS = {
    "planner": None,
    "mixed": {
        "a": ("row_wise", {}),
        "b": ("data_parallel", {}),
        "c": ("column_wise", {"ranks": [1, 0]}),
    },
    "nodes": {
        "a": ("grid_shard", {"host_indexes": [0]}),
        "b": ("table_row_wise", {"host_index": 0}),
        "c": ("table_wise", {"rank": 1}),
    },
}


def model(device=None):
    torch.manual_seed(5)
    tables = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                rows,
                DIM,
                name=f"t_{key}",
                feature_names=[key],
                pooling=PoolingType.MEAN if key == "a" else PoolingType.SUM,
            )
            for key, rows in ROWS.items()
        ],
        device=device,
    )
    return DLRM(tables, DENSE, [16, DIM], [16, 1], dense_device=device)


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    size = 3 + rank
    lengths = torch.randint(0, 4, (len(ROWS) * size,), generator=generator)
    values = torch.cat(
        [
            torch.randint(0, rows, (int(own.sum()),), generator=generator)
            for rows, own in zip(ROWS.values(), lengths.split(size), strict=True)
        ]
    )
    return (
        torch.randn(size, DENSE, generator=generator),
        KeyedJaggedTensor(list(ROWS), values, lengths=lengths),
        torch.randint(0, 2, (size,), generator=generator).float(),
    )


def loss_of(found, rank, step, device):
    dense, sparse, labels = batch(rank, step)
    logits = found(dense.to(device), sparse.to(device)).flatten()
    return nn.functional.binary_cross_entropy_with_logits(logits, labels.to(device))


def train(name, optimizer):
    rank, device = dist.get_rank(), rank_device()
    plain = model().to(device)
    sharder = EmbeddingBagCollectionSharder(
        {"optimizer": optimizer, "learning_rate": LR, "eps": EPS}
    )
    plan = None
    if PLANS[name] is not None:
        tables = sharding_plan.construct_module_sharding_plan(
            plain.get_submodule(PATH),
            {f"t_{key}": placed(kind, arguments) for key, (kind, arguments) in PLANS[name].items()},
            sharder,
            device_type=device.type,
        )
        plan = ShardingPlan({PATH: tables})
    dmp = DistributedModelParallel(plain, device=device, plan=plan, sharders=[sharder])
    assert isinstance(get_module(dmp), DistributedDataParallel)
    assert get_unwrapped_module(dmp) is dmp.module
    dense = {
        "exact_sgd": lambda params: torch.optim.SGD(params, lr=LR),
        "exact_adagrad": lambda params: torch.optim.Adagrad(params, lr=LR, eps=EPS),
    }[optimizer]
    left = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    optim = CombinedOptimizer([dmp.fused_optimizer, KeyedOptimizerWrapper(left, dense)])
    losses = []
    for step in range(STEPS):
        optim.zero_grad()
        loss = loss_of(dmp, rank, step, device)
        loss.backward()
        optim.step()
        losses.append(float(loss))
    state = {}
    for key, value in dmp.state_dict().items():
        if isinstance(value, ShardedTensor):
            state[key] = whole_on_each_rank(value)
        else:
            state[key] = value.cpu()
    return losses, state, str(dmp.plan)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("optimizer", ["exact_sgd", "exact_adagrad"])
@pytest.mark.parametrize("name", list(PLANS))
@pytest.mark.parametrize("world", [2, 4])
def test_losses_and_weights_are_those_of_one_rank(world, name, optimizer):
    found = run_on_ranks(world, train, name, optimizer)
    reference = model()
    dense = {
        "exact_sgd": lambda params: torch.optim.SGD(params, lr=LR),
        "exact_adagrad": lambda params: torch.optim.Adagrad(params, lr=LR, eps=EPS),
    }[optimizer](reference.parameters())
    for step in range(STEPS):
        dense.zero_grad()
        losses = [loss_of(reference, rank, step, torch.device("cpu")) for rank in range(world)]
        (sum(losses) / world).backward()
        dense.step()
        # Float32 sums in another order, through at most four steps of size 0.05.
        torch.testing.assert_close(
            torch.tensor([own[0][step] for own in found]),
            torch.stack(losses).detach(),
            rtol=1e-4,
            atol=1e-5,
        )
    expected = reference.state_dict()
    for rank, (_, state, _) in enumerate(found):
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            if state[key] is None:
                assert rank > 0
            else:
                torch.testing.assert_close(state[key], value, rtol=1e-3, atol=1e-4, msg=key)
    assert len({plan for _, _, plan in found}) == 1


def meta_model():
    """Built without memory; replicas begin alike, and stay alike on alike samples."""
    rank, device = dist.get_rank(), rank_device()
    torch.manual_seed(rank)
    dmp = DistributedModelParallel(model(torch.device("meta")), device=device)
    before = [p.detach().cpu().clone() for _, p in dmp.module.named_parameters()]
    dense = {key: value.cpu() for key, value in dmp.state_dict().items() if "embedding" not in key}
    return any(tensor.is_meta for tensor in before), dense


def test_a_model_on_the_meta_device_begins_alike_on_all_ranks():
    (meta, first), (other_meta, second) = run_on_ranks(2, meta_model)
    assert not meta
    assert not other_meta
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert len({float(value.flatten()[0]) for value in first.values()}) > 1


def late_wrapping():
    device = rank_device()
    dmp = DistributedModelParallel(
        model().to(device),
        device=device,
        init_data_parallel=False,
        data_parallel_wrapper=DefaultDataParallelWrapper(allreduce_comm_precision="fp16"),
    )
    assert get_module(dmp) is dmp.module
    names = [name for name, _ in dmp.named_parameters()]
    dmp.init_data_parallel()
    wrapped = get_module(dmp)
    dmp.init_data_parallel()
    assert get_module(dmp) is wrapped
    assert isinstance(wrapped, DistributedDataParallel)
    assert [name for name, _ in dmp.named_parameters()] == names
    assert [name for name, _ in dmp.bare_named_parameters()] == names
    loss_of(dmp, dist.get_rank(), 0, device).backward()
    return {
        name: parameter.grad.cpu()
        for name, parameter in dmp.named_parameters()
        if parameter.grad is not None
    }


def test_wrapping_can_wait_and_gradients_may_travel_in_fp16():
    first, second = run_on_ranks(2, late_wrapping)
    reference = model()
    (sum(loss_of(reference, rank, 0, torch.device("cpu")) for rank in range(2)) / 2).backward()
    assert first.keys() == second.keys()
    assert len(first) >= 8
    for name, parameter in reference.named_parameters():
        if name in first:
            assert torch.equal(first[name], second[name])
            # Two fp16 numbers (11 bits) and their sum were rounded.
            bound = 2**-9 * float(parameter.grad.abs().max())
            torch.testing.assert_close(first[name], parameter.grad, rtol=0, atol=bound)


def test_precisions_that_cannot_travel_are_refused():
    with pytest.raises(ValueError, match="allreduce_comm_precision is 'int8'; give 'fp16'"):
        DefaultDataParallelWrapper(allreduce_comm_precision="int8")
    with pytest.raises(ValueError, match="is 'bf16', which travels between GPUs"):
        DistributedModelParallel(
            model(),
            data_parallel_wrapper=DefaultDataParallelWrapper(allreduce_comm_precision="bf16"),
        )


def test_a_copy_shares_the_tables_and_nothing_else():
    dmp = DistributedModelParallel(model())
    copied = dmp.copy(torch.device("cpu"))
    assert copied.module.get_submodule(PATH) is dmp.module.get_submodule(PATH)
    ours, theirs = dict(dmp.named_parameters()), dict(copied.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert (theirs[name] is parameter) == ("embedding_bags" in name)
        assert torch.equal(theirs[name], parameter)


def test_states_may_carry_a_prefix():
    dmp = DistributedModelParallel(model())
    state = copy.deepcopy(dmp.state_dict(prefix="model."))
    assert all(name.startswith("model.") for name in state)
    with torch.no_grad():
        for _, parameter in dmp.named_parameters():
            parameter.zero_()
    dmp.load_state_dict({**state, "other": torch.zeros(1)}, prefix="model.")
    for name, value in dmp.state_dict(prefix="model.").items():
        assert torch.equal(value, state[name])


def test_tables_with_sparse_gradients_are_named():
    dmp = DistributedModelParallel(
        nn.ModuleDict({"x": nn.EmbeddingBag(3, 2, sparse=True), "y": nn.Embedding(3, 2)})
    )
    assert dmp.sparse_grad_parameter_names() == ["x.weight"]
    assert dmp.sparse_grad_parameter_names(["w"], prefix="m.") == ["w", "m.x.weight"]


def test_the_plan_has_torchrecs_field_name_too():
    model = DistributedModelParallel(torch.nn.Linear(2, 2))
    assert model._plan is model.plan
