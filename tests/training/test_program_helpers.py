"""What TorchRec programs import besides the library: test helpers, moved state dicts."""

import os
import unittest
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from tessera.training import test_utils
from tessera.training.datasets.criteo import CriteoIterDataPipe
from tessera.training.datasets.test_utils.criteo_test_utils import CriteoTest
from tessera.training.distributed.model_parallel import DistributedModelParallel
from tessera.training.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from tessera.training.inference.state_dict_transform import (
    state_dict_all_gather_keys,
    state_dict_gather,
    state_dict_to_device,
)
from tessera.training.modules.embedding_configs import EmbeddingBagConfig
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tests import forked_program
from tests.training.ranks import rank_device, run_on_ranks


def tables():
    return [
        EmbeddingBagConfig(name="a", embedding_dim=4, num_embeddings=7, feature_names=["f"]),
        EmbeddingBagConfig(name="b", embedding_dim=8, num_embeddings=3, feature_names=["g"]),
    ]


class Model(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.ebc = EmbeddingBagCollection(tables(), device=device)
        self.dense = torch.nn.Linear(2, 2)


def gathered(rank_of_extra):
    torch.manual_seed(3)
    device = rank_device()
    model = Model(torch.device("meta"))
    constraints = {
        "a": ParameterConstraints(sharding_types=["row_wise"]),
        "b": ParameterConstraints(sharding_types=["table_wise"]),
    }
    topology = Topology(world_size=2, compute_device=device.type)
    plan = EmbeddingShardingPlanner(topology, constraints=constraints).collective_plan(model)
    model = DistributedModelParallel(model, device=device, plan=plan)
    state = model.state_dict()
    for name, value in state.items():
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                rows = (
                    torch.arange(shard.tensor.size(0), device=device)
                    + shard.metadata.shard_offsets[0]
                )
                shard.tensor.copy_(rows[:, None].float() + len(name))
    if dist.get_rank() == rank_of_extra:
        state = {**state, "extra": torch.ones(1)}
    group = dist.new_group(backend="gloo")
    names = state_dict_all_gather_keys(state, group)
    moved = state_dict_to_device(state, group, torch.device("cpu"))
    own = dict.fromkeys(moved)
    plain = Model(torch.device("cpu"))
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    state_dict_gather(moved, plain.state_dict())
    # A rank that holds nothing of a table may leave it out, as TorchRec's state dicts do.
    sparse = {
        k: v for k, v in state.items() if not isinstance(v, ShardedTensor) or v.local_shards()
    }
    complete = state_dict_to_device(sparse, group, torch.device("cpu"))
    again = Model(torch.device("cpu"))
    state_dict_gather(complete, again.state_dict())
    return names, sorted(own), before, plain.state_dict(), again.state_dict()


@pytest.mark.multi_gpu
@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
def test_a_sharded_state_is_moved_and_gathered_on_rank_0():
    (names, own, _, plain, again), (other_names, other_own, before, other, _) = run_on_ranks(
        2, gathered, 1
    )
    expected = ["dense.bias", "dense.weight", *(f"ebc.embedding_bags.{t}.weight" for t in "ab")]
    assert names == other_names == other_own == [*expected, "extra"]
    assert own == expected
    for table in tables():
        name = f"ebc.embedding_bags.{table.name}.weight"
        rows = torch.arange(table.num_embeddings)[:, None] + float(len(name))
        whole = rows.expand(-1, table.embedding_dim)
        torch.testing.assert_close(plain[name], whole)
        torch.testing.assert_close(again[name], whole)
        torch.testing.assert_close(other[name], before[name])
    torch.testing.assert_close(plain["dense.weight"], other["dense.weight"])


def one_rank_refuses():
    group = dist.group.WORLD
    with pytest.raises(ValueError, match="'x' is of type int"):
        state_dict_to_device({"x": 3}, group, torch.device("cpu"))
    with pytest.raises(KeyError, match="y"):
        state_dict_gather({}, {"y": torch.ones(1)})
    return True


def test_entries_that_are_not_tensors_are_refused():
    assert run_on_ranks(1, one_rank_refuses) == [True]


def test_files_of_criteos_formats_are_made_and_deleted():
    np.random.seed(5)  # noqa: NPY002 - programs seed the global generator
    with CriteoTest._create_dataset_npys(num_rows=4, filenames=["day_0", "day_1"]) as paths:
        assert [Path(p).name for p in paths] == [
            f"day_{day}_{kind}.npy" for day in (0, 1) for kind in ("dense", "sparse", "labels")
        ]
        dense, sparse, labels = (np.load(p) for p in paths[:3])
        assert (dense.shape, sparse.shape, labels.shape) == ((4, 13), (4, 26), (4, 1))
        assert (dense.dtype, sparse.dtype, labels.dtype) == (np.float32, np.int32, np.int32)
        np.testing.assert_array_equal(np.load(paths[3]), dense)
    assert not Path(paths[0]).exists()
    np.random.seed(5)  # noqa: NPY002 - as TorchRec draws them
    drawn = np.random.random((4, 13))  # noqa: NPY002 - see above
    np.testing.assert_array_equal(drawn.astype(np.float32), dense)
    with CriteoTest._create_dataset_tsv(num_rows=3) as path:
        rows = list(CriteoIterDataPipe([path]))
    assert len(rows) == 3


def test_ports_and_sanitizers(monkeypatch):
    assert 0 < test_utils.get_free_port() < 65536
    calls = []
    skips = test_utils.skip_if_asan(calls.append)
    skips(1)
    assert calls == [1]
    assert not test_utils.is_asan_or_tsan()
    monkeypatch.setattr(test_utils, "is_asan", lambda: True)
    with pytest.raises(unittest.SkipTest, match="sanitizer"):
        skips(2)

    class Case(unittest.TestCase):
        pass

    assert test_utils.skip_if_asan_class(Case).__unittest_skip__


def joined():
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(test_utils.get_free_port()))
    group = test_utils.init_distributed_single_host(0, 1, "gloo", local_size=1)
    return dist.get_world_size(group), os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]


def test_a_process_joins_a_group_of_one_host(tmp_path):
    code = "from tests.training.test_program_helpers import joined; print(joined())"
    done = forked_program.run([], code=code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("(1, '0', '1')")
