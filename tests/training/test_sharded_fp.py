"""Position weights on ranks: outputs, and gradients of the weights and tables, as on one rank."""

import pytest
import torch
from torch import distributed as dist
from torch import nn

from tessera.training.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tessera.training.distributed.fp_embeddingbag import (
    FeatureProcessedEmbeddingBagCollectionSharder,
)
from tessera.training.distributed.model.data_parallel import DefaultDataParallelWrapper
from tessera.training.distributed.model_parallel import DistributedModelParallel
from tessera.training.distributed.types import ShardingPlan
from tessera.training.modules.feature_processor_ import (
    FeatureProcessor,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from tessera.training.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from tessera.training.sparse.jagged_tensor import JaggedTensor
from tests.training.ranks import rank_device, run_on_ranks
from tests.training.sharded_cases import Case, gradient, kjt_of, plain_collection, plan_of
from tests.training.test_sharded_ebc import BATCHES, TABLES, plans

LR = 0.1


def processed_collection(case, *, each):
    ebc = plain_collection(case)
    lengths = dict.fromkeys(case.features(), case.most_ids)
    processors = (
        {name: PositionWeightedModule(length) for name, length in lengths.items()}
        if each
        else PositionWeightedModuleCollection(lengths)
    )
    module = FeatureProcessedEmbeddingBagCollection(ebc, processors)
    torch.manual_seed(case.seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "position" in name:
                parameter.uniform_(0.5, 2.0)
    return module


def unweighted(case, rank, step, device):
    kjt = kjt_of(case, rank, step, device)
    return kjt.with_fields(kjt.values(), None, kjt.lengths(), None)


def train(cases, each, static_graph):
    return [train_one(case, each, static_graph) for case in cases]


def train_one(case, each, static_graph):
    rank, device = dist.get_rank(), rank_device()
    module = processed_collection(case, each=each)
    sharder = FeatureProcessedEmbeddingBagCollectionSharder(
        EmbeddingBagCollectionSharder({"optimizer": "exact_sgd", "learning_rate": LR})
    )
    plan = ShardingPlan({"": plan_of(case, module, sharder, device)})
    dmp = DistributedModelParallel(
        module,
        device=device,
        plan=plan,
        sharders=[sharder],
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=static_graph),
    )
    left = [p for _, p in dmp.named_parameters() if not hasattr(p, "_in_backward_optimizers")]
    optimizer = torch.optim.SGD(left, lr=LR)
    outputs = []
    for step in range(case.steps):
        values = dmp(unweighted(case, rank, step, device)).values()
        outputs.append(values.detach().cpu().clone())
        optimizer.zero_grad()
        (values * gradient(case, rank, step, values.size(1)).to(device)).sum().backward()
        optimizer.step()
    state = dmp.state_dict()
    return outputs, {key: state[key].cpu() for key in state if "position" in key}, list(state)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("static_graph", [False, True])
def test_three_steps_equal_the_plain_collections(world, each, static_graph):
    local = 2 if world == 4 else world
    cases = [
        Case(TABLES, plan, BATCHES[world], weighted=True, seed=seed, local_size=local)
        for seed, plan in enumerate(plans(world).values())
    ]
    per_rank = run_on_ranks(world, train, cases, each, static_graph, local_world_size=local)
    for place, case in enumerate(cases):
        plain = processed_collection(case, each=each)
        optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
        for step in range(case.steps):
            total = 0
            for rank in range(world):
                values = plain(unweighted(case, rank, step, torch.device("cpu"))).values()
                # Float32 sums in another order, after at most three steps.
                torch.testing.assert_close(
                    per_rank[rank][place][0][step], values, rtol=1e-4, atol=1e-4
                )
                total = total + (values * gradient(case, rank, step, values.size(1))).sum() / world
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
        expected = plain.state_dict()
        for found in per_rank:
            _, weights, names = found[place]
            assert sorted(names) == sorted(expected)
            assert len(weights) == len(case.features())
            for name, value in weights.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4, msg=name)


class Halves(FeatureProcessor):
    """Weights by id, not by place."""

    def __init__(self):
        super().__init__()
        self.odd = nn.Parameter(torch.tensor(0.5))

    def forward(self, features):
        weights = torch.where(features.values() % 2 == 1, self.odd, torch.ones(()))
        return JaggedTensor(features.values(), weights, features.lengths())


def other_processor(case):
    sharder = FeatureProcessedEmbeddingBagCollectionSharder()
    device = rank_device()
    module = FeatureProcessedEmbeddingBagCollection(
        plain_collection(case), {name: Halves() for name in case.features()}
    )
    expected = module(unweighted(case, dist.get_rank(), 0, torch.device("cpu"))).values()
    plan = ShardingPlan({"": plan_of(case, module, sharder, device)})
    dmp = DistributedModelParallel(module, device=device, plan=plan, sharders=[sharder])
    found = dmp(unweighted(case, dist.get_rank(), 0, device)).values().cpu()
    return float((found - expected).abs().max())


def test_other_processors_follow_whole_bags_only():
    made = plans(2)
    case = Case(TABLES, made["table_wise"], BATCHES[2], weighted=True, local_size=2)
    assert max(run_on_ranks(2, other_processor, case)) < 1e-5
    torn = Case(TABLES, made["row_wise"], BATCHES[2], weighted=True, local_size=2)
    with pytest.raises(AssertionError, match="row_wise, which splits bags"):
        run_on_ranks(2, other_processor, torn)


def test_settings_come_from_one_place():
    settings = {"learning_rate": LR}
    sharder = FeatureProcessedEmbeddingBagCollectionSharder(fused_params=settings)
    assert sharder.fused_params == settings
    inner = EmbeddingBagCollectionSharder(settings)
    assert FeatureProcessedEmbeddingBagCollectionSharder(inner).fused_params == settings
    with pytest.raises(ValueError, match="give them to that"):
        FeatureProcessedEmbeddingBagCollectionSharder(inner, fused_params=settings)
    with pytest.raises(ValueError, match=r"ebc_sharder is a dict; .* fused_params="):
        FeatureProcessedEmbeddingBagCollectionSharder(settings)
