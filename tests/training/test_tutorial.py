"""The introductory tutorial of the library that these names come from, first cell to last.

Its code as users know it, with the imports that this project needs, on the CPU, and with what
each cell prints asserted instead.
"""

import copy
import inspect
import os

import pytest
import torch
import torch.distributed as dist
from torch import quantization as quant
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

from tessera import training
from tessera.training import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from tessera.training import distributed as training_dist
from tessera.training.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from tessera.training.distributed.planner import EmbeddingShardingPlanner, Topology
from tessera.training.distributed.shard import _shard_modules
from tessera.training.distributed.types import LazyAwaitable, ShardingEnv
from tessera.training.fx import Tracer
from tessera.training.modules.embedding_configs import QuantConfig
from tessera.training.optim.fused import EmbOptimType
from tessera.training.optim.keyed import CombinedOptimizer
from tessera.training.optim.optimizers import in_backward_optimizer_filter
from tessera.training.quant.embedding_modules import (
    EmbeddingBagCollection as QuantEmbeddingBagCollection,
)


def test_embeddings_in_torch():
    num_embeddings, embedding_dim = 10, 4
    weights = torch.rand(num_embeddings, embedding_dim)
    embedding_collection = torch.nn.Embedding(num_embeddings, embedding_dim, _weight=weights)
    embedding_bag_collection = torch.nn.EmbeddingBag(num_embeddings, embedding_dim, _weight=weights)
    ids = torch.tensor([[1, 3]])
    embeddings = embedding_collection(ids)
    assert embeddings.shape == (1, 2, 4)
    pooled_embeddings = embedding_bag_collection(ids)
    assert torch.equal(pooled_embeddings, torch.mean(embeddings, dim=1))


def make_ebc():
    return training.EmbeddingBagCollection(
        device="cpu",
        tables=[
            training.EmbeddingBagConfig(
                name="product_table",
                embedding_dim=64,
                num_embeddings=4096,
                feature_names=["product"],
                pooling=training.PoolingType.SUM,
            ),
            training.EmbeddingBagConfig(
                name="user_table",
                embedding_dim=64,
                num_embeddings=4096,
                feature_names=["user"],
                pooling=training.PoolingType.SUM,
            ),
        ],
    )


def make_kjt():
    product_jt = JaggedTensor(values=torch.tensor([1, 2, 1, 5]), lengths=torch.tensor([3, 1]))
    user_jt = JaggedTensor(values=torch.tensor([2, 3, 4, 1]), lengths=torch.tensor([2, 2]))
    return KeyedJaggedTensor.from_jt_dict({"product": product_jt, "user": user_jt})


def test_modules_and_data_types():
    ebc = make_ebc()
    assert "(product_table): EmbeddingBag(4096, 64, mode='sum'" in str(ebc.embedding_bags)
    assert "features: KeyedJaggedTensor" in inspect.getsource(ebc.forward)

    id_list_feature_lengths = torch.tensor([1, 2])
    id_list_feature_values = torch.tensor([5, 7, 1])
    id_list_feature_offsets = torch.cumsum(id_list_feature_lengths, dim=0)
    assert id_list_feature_offsets.tolist() == [1, 3]
    jt = JaggedTensor(values=id_list_feature_values, lengths=id_list_feature_lengths)
    assert jt.offsets().tolist() == [0, 1, 3]
    assert [bag.tolist() for bag in jt.to_dense()] == [[5], [7, 1]]
    assert str(jt) == "JaggedTensor({\n    [[5], [7, 1]]\n})\n"

    kjt = make_kjt()
    assert kjt.keys() == ["product", "user"]
    assert kjt.lengths().tolist() == [3, 1, 2, 2]
    assert kjt.values().tolist() == [1, 2, 1, 5, 2, 3, 4, 1]
    assert list(kjt.to_dict()) == ["product", "user"]
    assert str(kjt) == (
        'KeyedJaggedTensor({\n    "product": [[1, 2, 1], [5]],\n    "user": [[2, 3], [4, 1]]\n})\n'
    )
    assert kjt.offsets().tolist() == [0, 3, 4, 6, 8]

    result = ebc(kjt)
    assert result.keys() == ["product", "user"]
    assert result.values().shape == (2, 128)
    for embedding in result.to_dict().values():
        assert embedding.shape == (2, 64)


@pytest.fixture
def process_group(monkeypatch):
    # Port 0: the store takes a free one.
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "0"),
    ):
        monkeypatch.setenv(name, value)
    dist.init_process_group(backend="gloo")
    yield dist.GroupMember.WORLD
    dist.destroy_process_group()


def test_distributed_training_and_sharding(process_group):  # noqa: PLR0915 - one story
    assert os.environ["WORLD_SIZE"] == "1"
    pg = process_group
    assert pg is not None
    ebc, kjt = make_ebc(), make_kjt()
    expected = ebc(kjt).values().detach()
    sharder = EmbeddingBagCollectionSharder()

    planner = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu"))
    plan = planner.collective_plan(ebc, [sharder], pg)
    for table in ("product_table", "user_table"):
        assert plan.plan[""][table].ranks == [0]
        assert plan.plan[""][table].compute_kernel == "fused"
        assert table in str(plan)

    env = ShardingEnv.from_process_group(pg)
    cpu = torch.device("cpu")
    sharded_ebc = sharder.shard(ebc, plan.plan[""], env, cpu)
    assert isinstance(sharded_ebc, ShardedEmbeddingBagCollection)
    assert "ShardedEmbeddingBagCollection" in str(sharded_ebc)

    class ExampleAwaitable(LazyAwaitable[torch.Tensor]):
        def __init__(self, size: list[int]) -> None:
            super().__init__()
            self._size = size

        def _wait_impl(self) -> torch.Tensor:
            return torch.ones(self._size)

    awaitable = ExampleAwaitable([3, 2])
    assert torch.equal(awaitable.wait(), torch.ones(3, 2))
    assert float(torch.sum(ExampleAwaitable([3, 2]))) == 6

    kjt = kjt.to("cpu")
    output = sharded_ebc(kjt)
    kt = output.wait()
    assert isinstance(kt, KeyedTensor)
    assert kt.keys() == ["product", "user"]
    assert kt.values().shape == (2, 128)
    # Sums of two or three numbers, perhaps in another order.
    torch.testing.assert_close(kt.values().detach(), expected, rtol=0, atol=1e-6)
    for embedding in kt.to_dict().values():
        assert embedding.shape == (2, 64)

    # The anatomy of a sharded module.
    assert len(sharded_ebc._output_dists) == 1
    assert "GroupedPooledEmbeddingsLookup" in str(sharded_ebc._lookups)

    # The whole model at once.
    model = training.DistributedModelParallel(copy.deepcopy(ebc), device=cpu)
    torch.testing.assert_close(model(kjt).wait().values(), kt.values())
    assert "ShardedEmbeddingBagCollection" in str(model)

    # Option 1: the optimizer through fused_params.
    fused_params = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": 0.02,
        "eps": 0.002,
    }
    sharder_with_fused_params = EmbeddingBagCollectionSharder(fused_params=fused_params)
    sharded_ebc_fused_params = sharder_with_fused_params.shard(ebc, plan.plan[""], env, cpu)
    assert "lr: 0.01" in str(sharded_ebc.fused_optimizer)
    assert "lr: 0.02" in str(sharded_ebc_fused_params.fused_optimizer)
    assert isinstance(sharded_ebc_fused_params.fused_optimizer, CombinedOptimizer)

    # Option 2: the optimizer given to the plain collection's parameters.
    ebc_apply_opt = copy.deepcopy(ebc)
    optimizer_kwargs = {"lr": 0.5}
    names = []
    for name, param in ebc_apply_opt.named_parameters():
        names.append(name)
        apply_optimizer_in_backward(torch.optim.SGD, [param], optimizer_kwargs)
    assert names == ["embedding_bags.product_table.weight", "embedding_bags.user_table.weight"]
    sharded_ebc_apply_opt = sharder.shard(ebc_apply_opt, plan.plan[""], env, cpu)
    assert "lr: 0.5" in str(sharded_ebc_apply_opt.fused_optimizer)
    assert dict(in_backward_optimizer_filter(sharded_ebc_fused_params.named_parameters())) == {}

    # No optimizer.step(): the backward pass has changed the tables.
    losses = []
    for _ in range(2):
        ebc_output = sharded_ebc_fused_params(kjt).wait().values()
        loss = torch.sum(torch.ones_like(ebc_output) - ebc_output)
        losses.append(float(loss))
        loss.backward()
    # Two samples of 128 numbers near 0; the first step of row-wise Adagrad is about the rate.
    assert losses[0] == pytest.approx(256, abs=5)
    assert losses[1] < losses[0] - 5


class InferenceModule(torch.nn.Module):
    def __init__(self, ebc: training.EmbeddingBagCollection):
        super().__init__()
        self.ebc_ = ebc

    def forward(self, kjt: KeyedJaggedTensor):
        return self.ebc_(kjt)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_inference():
    ebc, kjt = make_ebc(), make_kjt()
    module = InferenceModule(ebc)
    for param in module.parameters():
        assert (param.shape, param.dtype) == ((4096, 64), torch.float32)
    expected = module(kjt).values()

    quant_dtype = torch.int8
    qconfig = QuantConfig(
        activation=quant.PlaceholderObserver.with_args(dtype=torch.float),
        weight=quant.PlaceholderObserver.with_args(dtype=quant_dtype),
    )
    qconfig_spec = {training.EmbeddingBagCollection: qconfig}
    mapping = {training.EmbeddingBagCollection: QuantEmbeddingBagCollection}
    module = InferenceModule(ebc)
    qebc = quant.quantize_dynamic(module, qconfig_spec=qconfig_spec, mapping=mapping, inplace=False)
    assert "QuantizedEmbeddingBagCollection" in str(qebc)
    kjt = kjt.to("cpu")
    quantized = qebc(kjt).values()
    # At most 3 numbers of a range of 2/64, each off by half of 1/255 of it or a float16's rounding.
    torch.testing.assert_close(quantized, expected, rtol=0, atol=3 * (1 / 64) / 255 * 1.3)
    assert {name: (buffer.shape, buffer.dtype) for name, buffer in qebc.named_buffers()} == {
        "ebc_.embedding_bags.product_table.weight": ((4096, 80), torch.uint8),
        "ebc_.embedding_bags.user_table.weight": ((4096, 80), torch.uint8),
    }

    # Features in another order, one that no table serves, and another batch size.
    other = KeyedJaggedTensor(
        ["user", "other", "product"],
        torch.tensor([7, 100_000, 9, 9]),
        lengths=torch.tensor([1, 0, 0, 1, 0, 0, 0, 0, 2]),
    )
    quantized_other = qebc(other).values()

    sharded_qebc = _shard_modules(
        module=qebc,
        device=torch.device("cpu"),
        env=training_dist.ShardingEnv.from_local(1, 0),
    )
    assert "ShardedQuantEmbeddingBagCollection" in str(sharded_qebc)
    assert torch.equal(sharded_qebc(kjt).values(), quantized)

    tracer = Tracer(leaf_modules=["IntNBitTableBatchedEmbeddingBagsCodegen"])
    graph = tracer.trace(sharded_qebc)
    gm = torch.fx.GraphModule(sharded_qebc, graph)
    assert "int_nbit_split_embedding_codegen_lookup_function" in gm.code
    scripted_gm = torch.jit.script(gm)
    assert "int_nbit_split_embedding_codegen_lookup_function" in scripted_gm.code
    assert torch.equal(scripted_gm(kjt).values(), quantized)

    assert torch.equal(scripted_gm(other).values(), quantized_other)
