"""What programs written for TorchRec say to planners and of tables, and what comes of it."""

import pytest
import torch
from torch import nn

from tessera.training import DataType, EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingConfig
from tessera.training.distributed import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from tessera.training.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    PlannerError,
    Topology,
)
from tessera.training.distributed.planner.enumerators import EmbeddingEnumerator
from tessera.training.distributed.planner.partitioners import GreedyPerfPartitioner
from tessera.training.distributed.planner.stats import NoopEmbeddingStats
from tessera.training.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
)
from tessera.training.distributed.planner.types import Perf, Shard, ShardingOption, Storage
from tessera.training.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from tessera.training.optim import apply_optimizer_in_backward as in_backward


def collection(features=("a", "b"), device="meta"):
    table = EmbeddingBagConfig(1000, 64, name="t", feature_names=list(features))
    return EmbeddingBagCollection([table], device=torch.device(device))


def planner(world_size, constraint, device="cpu", **more):
    return EmbeddingShardingPlanner(
        Topology(world_size, device), stats=NoopEmbeddingStats(), constraints=constraint, **more
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_ordinary_parameters_are_planned_as_copies_on_all_ranks(world_size, device):
    wanted = {"t": ParameterConstraints(compute_kernels=["dense"])}
    plan = planner(world_size, wanted, device).plan(collection(), [EmbeddingBagCollectionSharder()])
    where = plan.plan[""]["t"]
    assert (where.sharding_type, where.compute_kernel) == ("data_parallel", "dense")
    for sharder in (EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()):
        offered = {
            kind: sharder.compute_kernels(kind, device) for kind in sharder.sharding_types(device)
        }
        assert [kind for kind, kernels in offered.items() if "dense" in kernels] == [
            "data_parallel"
        ]
        assert "fused" in offered["table_wise"]


def kernel_by_hand(module, way, settings=None):
    sharder = EmbeddingBagCollectionSharder(settings)
    plan = construct_module_sharding_plan(
        module, {"t": way}, sharder, local_size=1, world_size=1, device_type="cpu"
    )
    return plan["t"].compute_kernel


def test_a_plan_by_hand_has_the_kernel_that_torchrec_gives_it():
    module = collection(device="cpu")
    assert [kernel_by_hand(module, way) for way in (table_wise(0), row_wise())] == ["dense"] * 2
    assert kernel_by_hand(module, table_wise(0, "fused")) == "fused"
    assert kernel_by_hand(module, table_wise(0, "dense"), {"optimizer": "adam"}) == "dense"
    assert kernel_by_hand(module, data_parallel(), {"optimizer": "adam"}) == "dense"
    with pytest.warns(UserWarning, match=r"optimizer \(adam\) does not update .*='fused'"):
        assert kernel_by_hand(module, row_wise(), {"optimizer": "adam"}) == "dense"
    with pytest.raises(ValueError, match="'magic'"):
        kernel_by_hand(module, table_wise(0, "magic"))
    in_backward.apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    assert kernel_by_hand(module, row_wise()) == "fused"
    assert kernel_by_hand(module, data_parallel()) == "dense"


def estimated(constraint, batch=8):
    topology = Topology(4, "cuda")
    options = EmbeddingEnumerator(topology, batch, {"t": constraint}).enumerate(
        collection(), [EmbeddingBagCollectionSharder()]
    )
    return next(way for way in options if way.sharding_type == "table_wise").shards[0]


def test_batches_and_bags_of_single_features_count_as_many_samples_would():
    lengths = {"pooling_factors": [3.0, 3.0]}
    plain = estimated(ParameterConstraints(batch_size=16, **lengths))
    for same in (
        ParameterConstraints(batch_sizes=[16, 16], **lengths),
        ParameterConstraints(num_poolings=[2.0, 2.0], **lengths),
        ParameterConstraints(batch_sizes=[24, 8], feature_names=["b", "a"], **lengths),
        ParameterConstraints(num_poolings=[1.0, 3.0], pooling_factors=[3.0]),
    ):
        assert estimated(same) == plain
    assert estimated(ParameterConstraints(num_poolings=[4.0, 4.0], **lengths)) != plain
    wanted = ParameterConstraints(batch_sizes=[24, 8], **lengths)
    assert wanted.ids_per_step(8) == 24 * 3 + 8 * 3
    assert ParameterConstraints(num_poolings=[2.0, 4.0]).ids_per_step(10) == 60
    assert ParameterConstraints(pooling_factors=[2.0]).ids_per_step(10) == 20


def test_what_a_constraint_says_reaches_the_plan():
    wanted = {"t": ParameterConstraints(output_dtype=DataType.FP16, device_group="cpu")}
    plan = planner(2, wanted).plan(collection(), [EmbeddingBagCollectionSharder()])
    assert plan.plan[""]["t"].output_dtype is DataType.FP16


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"feature_names": ["a", "z"]}, r"'t': feature_names of its constraints are \['a', 'z'\]"),
        ({"device_group": "cuda"}, "'t': device_group is 'cuda', but the topology's .* 'cpu'"),
        ({"num_poolings": [1.0]}, "num_poolings has 1 entries for 2 features"),
        ({"batch_sizes": [8] * 3}, "batch_sizes has 3 entries for 2 features"),
    ],
)
def test_constraints_of_other_features_and_devices_are_refused(constraint, message):
    enumerator = EmbeddingEnumerator(
        Topology(2, "cpu"), 8, {"t": ParameterConstraints(**constraint)}
    )
    with pytest.raises((PlannerError, ValueError), match=message):
        enumerator.enumerate(collection(), [EmbeddingBagCollectionSharder()])


def test_numbers_at_the_edge_are_taken():
    assert Topology(1, "cuda", local_world_size=8).num_hosts == 1
    assert Topology(2, "cpu", ssd_cap=7).devices[1].storage == Storage(
        0, Topology(1, "cpu").devices[0].storage.ddr, 7
    )
    left = FixedPercentageStorageReservation(1.0).reserve(
        Topology(2, "cuda"), 8, nn.Linear(1, 1), []
    )
    assert left.devices[0].storage.hbm == 0
    assert HeuristicalStorageReservation(percentage=1.0) is not None
    for numbers in ({"batch_sizes": [0]}, {"num_poolings": [-1.0]}):
        with pytest.raises(ValueError, match="give a positive number"):
            ParameterConstraints(**numbers)


def test_an_option_says_where_its_shards_may_lie():
    fields = {
        "name": "t",
        "tensor": torch.empty(4, 4),
        "module": ("", nn.Module()),
        "input_lengths": [1.0],
        "batch_size": 2,
        "compute_kernel": "fused",
        "shards": [Shard([4, 4], [0, 0], Storage(1, 2, 3), Perf())],
    }
    option = ShardingOption(sharding_type="row_wise", **fields)
    assert option.partition_by == "uniform"
    assert option.total_storage == Storage(1, 2, 3)
    moved = ShardingOption(sharding_type="row_wise", partition_by="device", **fields)
    assert moved.partition_by == "device"
    assert moved.placed([1]).partition_by == "device"
    wrong = ShardingOption(sharding_type="row_wise", partition_by="devise", **fields)
    with pytest.raises(ValueError, match="partition_by is 'devise'"):
        GreedyPerfPartitioner().partition([wrong], Topology(1, "cpu"))


@pytest.mark.parametrize("kind", [EmbeddingBagConfig, EmbeddingConfig])
def test_a_table_has_torchrecs_fields_of_tables_that_are_not_whole(kind):
    table = kind(10, 4, name="t", use_virtual_table=False, num_embeddings_post_pruning=10)
    assert table.num_embeddings_post_pruning is None
    assert (table.input_dim, table.total_num_buckets, table.stash_weights) == (None, None, False)
    assert kind(10, 4, name="t", total_num_buckets=2).total_num_buckets == 2  # rows are cut evenly
    for field, value in (
        ("num_embeddings_post_pruning", 5),
        ("use_virtual_table", True),
        ("virtual_table_eviction_policy", object()),
    ):
        with pytest.raises(ValueError, match=f"table 't': {field} is .* leave it out"):
            kind(10, 4, name="t", **{field: value})
