"""Quantized collections on the devices of a GPU host (TESSERA_TEST_DEVICE=cuda), or on the CPU."""

import itertools
import os

import pytest
import torch
from torch import nn

from tessera.training import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from tessera.training.distributed.quant_embedding import QuantEmbeddingCollectionSharder
from tessera.training.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from tessera.training.distributed.types import ParameterSharding, ShardingEnv
from tessera.training.fx import symbolic_trace
from tessera.training.quant.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

pytestmark = pytest.mark.multi_gpu

DEVICE = torch.device(os.environ.get("TESSERA_TEST_DEVICE", "cpu"))
DEVICES = torch.cuda.device_count() if DEVICE.type == "cuda" else 2
TYPES = ("table_wise", "column_wise", "row_wise")


# FBGEMM's lookup of integer rows on a GPU multiplies and adds in float16, rounding once; on a CPU it
# is float32, and the order of the sums and fused roundings differ.
ROUNDING = 2**-11 if DEVICE.type == "cuda" else 2**-24


def check(found, expected, numbers):
    """Sums of up to ``numbers`` numbers, each rounded once more; none of them is above 8."""
    rtol, atol = (ROUNDING, 1e-5) if numbers == 1 else (0, numbers * 8 * ROUNDING + 2e-5)
    torch.testing.assert_close(found.cpu(), expected, rtol=rtol, atol=atol)


def placed(kind, rank):
    ranks = {"table_wise": [rank % DEVICES], "column_wise": [0, (rank + 1) % DEVICES]}
    return ParameterSharding(kind, "quant", ranks.get(kind))


def batch(B):
    lengths = torch.randint(0, 4, (3 * B,))
    ids = torch.cat(
        [
            torch.randint(0, rows, (int(own.sum()),))
            for rows, own in zip((50, 3, 7), lengths.split(B), strict=True)
        ]
    )
    return KeyedJaggedTensor(["x", "y", "z"], ids, weights=torch.rand(len(ids)), lengths=lengths)


class Model(nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.tables = tables

    def forward(self, kjt: KeyedJaggedTensor):
        return self.tables(kjt)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kinds", list(itertools.product(TYPES, TYPES)))
def test_all_devices_together_answer_as_the_cpu(kinds, weighted):
    module = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                50, 64, name="a", feature_names=["x"], pooling=PoolingType.MEAN,
                data_type=DataType.INT8,
            ),
            EmbeddingBagConfig(
                7, 32, name="b", feature_names=["y", "z"], data_type=DataType.INT4
            ),
        ],
        weighted,
        "cpu",
    )  # fmt: skip
    module.store({part.name: torch.randn(part.rows, part.dim) for part in module.rows.parts()})
    plan = {name: placed(kind, i) for i, (name, kind) in enumerate(zip("ab", kinds, strict=True))}
    env = ShardingEnv.from_local(DEVICES, 0)
    made = QuantEmbeddingBagCollectionSharder().shard(module, plan, env, DEVICE)
    compiled = torch.jit.script(symbolic_trace(Model(made)))
    for B in (1, 33):
        kjt = batch(B)
        expected = module(kjt).values()
        for given in (kjt, kjt.to(DEVICE)):
            for model in (made, compiled):
                out = model(given).values()
                assert out.device.type == DEVICE.type
                check(out, expected, 3)


@pytest.mark.parametrize("kinds", list(itertools.product(TYPES, TYPES)))
def test_all_devices_together_give_the_cpus_unpooled_vectors(kinds):
    module = EmbeddingCollection(
        [
            EmbeddingConfig(50, 64, name="a", feature_names=["x"], data_type=DataType.INT8),
            EmbeddingConfig(7, 64, name="b", feature_names=["y", "z"], data_type=DataType.FP16),
        ],
        "cpu",
    )
    module.store({part.name: torch.randn(part.rows, part.dim) for part in module.rows.parts()})
    plan = {name: placed(kind, i) for i, (name, kind) in enumerate(zip("ab", kinds, strict=True))}
    env = ShardingEnv.from_local(DEVICES, 0)
    made = QuantEmbeddingCollectionSharder().shard(module, plan, env, DEVICE)
    kjt = batch(9)
    expected = module(kjt)
    for name, jagged in made(kjt.to(DEVICE)).items():
        check(jagged.values(), expected[name].values(), 1)
        assert torch.equal(jagged.lengths().cpu(), expected[name].lengths())


def test_a_collection_moves_to_a_device_and_back():
    module = EmbeddingBagCollection(
        [EmbeddingBagConfig(50, 64, name="a", feature_names=["x"], data_type=DataType.INT8)],
        False,
        "cpu",
    )
    module.store({"a": torch.randn(50, 64)})
    kjt = batch(5)
    expected = module(kjt).values()
    moved = module.to(DEVICE)
    assert moved.device.type == DEVICE.type
    check(moved(kjt.to(DEVICE)).values(), expected, 3)
    assert torch.equal(module.cpu()(kjt).values(), expected)
