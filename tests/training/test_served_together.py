"""Table-wise and column-wise tables of a pooled collection are served by one sharding, with the same results."""

import pytest
import torch

from tessera.training import EmbeddingBagCollection, EmbeddingBagConfig
from tessera.training.distributed import sharding_plan
from tessera.training.distributed.checkpoint import load_checkpoint, save_checkpoint
from tessera.training.distributed.collections import sharded_collection
from tessera.training.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tessera.training.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from tessera.training.distributed.sharding.creation import (
    create_sharding_infos_by_sharding,
    pooled_infos_served_together,
)
from tessera.training.distributed.sharding.registry import strategy_of
from tessera.training.optim.keyed_optimizer import grouped_as_here
from tests.training.ranks import rank_device, run_on_ranks
from tests.training.sharded_cases import Case, Table, gradient, kjt_of, shard

TABLES = (
    Table("a", 31, 8, ("f", "g")),
    Table("b", 17, 16, ("h",), mean=True),
    Table("c", 23, 12, ("i",)),
    Table("d", 11, 8, ("j",)),
    Table("e", 13, 24, ("f",)),
)


def mixed(world, **settings):
    """Table-wise tables between column-wise ones, and one that is neither."""
    last = world - 1
    return Case(
        TABLES,
        {
            "a": ("table_wise", {"rank": last}),
            "b": ("column_wise", {"ranks": [0, last], "size_per_rank": [4, 12]}),
            "c": ("table_wise", {"rank": 0}),
            "d": ("row_wise", {}),
            "e": ("column_wise", {"ranks": [last, 0, last]}),
        },
        batch_sizes=tuple(range(4, 4 + world)),
        **settings,
    )


def apart():
    """Serve tables by sharding type, as it was before (undone by what is returned)."""
    together = sharded_collection.pooled_infos_served_together
    sharded_collection.pooled_infos_served_together = lambda by_type, *_: by_type

    def undo():
        sharded_collection.pooled_infos_served_together = together

    return undo


def made(case, *, together):
    undo = None if together else apart()
    try:
        return shard(case)
    finally:
        if undo is not None:
            undo()


def step(case, module, number):
    rank = torch.distributed.get_rank()
    out = module(kjt_of(case, rank, number, rank_device(), case.features()[::-1]))
    values = out.values()
    weight = gradient(case, rank, number, values.size(1)).to(values.device)
    (values * weight).sum().backward()
    return out.keys(), values.detach().cpu().clone()


def state_of(module):
    """Every tensor and number of the module and its optimizer by name, whole, and the names in order."""
    found = {}
    optimizer = module.fused_optimizer.state_dict()["state"]
    named = {**module.state_dict()}
    named |= {
        f"{name}:{key}": value for name, own in optimizer.items() for key, value in own.items()
    }
    for name, value in sorted(named.items()):
        if hasattr(value, "local_shards"):
            found[name] = [
                (
                    own.metadata.shard_offsets,
                    own.metadata.shard_sizes,
                    own.tensor.detach().cpu().clone(),
                )
                for own in value.local_shards()
            ]
            found[f"{name} placement"] = [
                (own.shard_offsets, own.shard_sizes, str(own.placement))
                for own in value.metadata().shards_metadata
            ]
        else:
            found[name] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
    names = [*module.state_dict()], [name for name, _ in module.named_parameters()]
    return found, names, [*optimizer]


def same(found, expected):
    """Whether both hold the same values in the same places, tensors bit for bit."""
    if isinstance(found, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(found, dict):
        return [*found] == [*expected] and same([*found.values()], [*expected.values()])
    if isinstance(found, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


def trained(case, *, together):
    module = made(case, together=together)
    outputs = [step(case, module, number) for number in range(case.steps)]
    state, names, in_optimizer = state_of(module)
    return [*module.shardings], outputs, state, names, sorted(in_optimizer)


def both_ways(case):
    return trained(case, together=False), trained(case, together=True)


@pytest.mark.parametrize("optimizer", ["exact_sgd", "exact_row_wise_adagrad", "adam"])
@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, {}),
        (2, {"weighted": True}),
        (2, {"variable": True}),
        (3, {"codecs": QCommsConfig(CommType.FP16, CommType.BF16)}),
    ],
)
def test_one_sharding_gives_the_bits_of_two(world, settings, optimizer):
    case = mixed(world, optimizer=optimizer, **settings)
    for before, after in run_on_ranks(world, both_ways, case):
        assert before[0] == ["table_wise", "column_wise", "row_wise"]
        assert after[0] == ["column_wise", "row_wise"]
        assert same(after[1:], before[1:])


def moved_by_checkpoint(folder, case):
    """Saved in two shardings, read by one; and the optimizer's state dict as torch hands it over."""
    old = made(case, together=False)
    for number in range(2):
        step(case, old, number)
    for group in old.fused_optimizer.param_groups:
        group["lr"] = 0.07
    save_checkpoint(folder, model=old, optimizer=old.fused_optimizer)
    handed = made(case, together=True)
    handed.load_state_dict(old.state_dict())
    handed.fused_optimizer.load_state_dict(old.fused_optimizer.state_dict())
    read = made(case, together=True)
    load_checkpoint(folder, model=read, optimizer=read.fused_optimizer)
    found = []
    for module in (old, handed, read):
        groups = module.fused_optimizer.param_groups
        outputs = step(case, module, 2)
        state, names, in_optimizer = state_of(module)
        found.append(
            ({group["lr"] for group in groups}, outputs, state, names, sorted(in_optimizer))
        )
    return found, [len(module.fused_optimizer.param_groups) for module in (old, read)]


def test_a_checkpoint_of_two_shardings_is_read_by_one(tmp_path):
    results = run_on_ranks(2, moved_by_checkpoint, tmp_path / "saved", mixed(2, optimizer="adam"))
    for (before, handed, read), groups in results:
        assert before[0] == {0.07}
        assert same(handed, before)
        assert same(read, before)
        assert groups[0] > groups[1]


def test_groups_of_a_state_are_joined_only_where_they_agree():
    saved = [
        {"params": ["a"], "lr": 1.0},
        {"params": ["b", "c"], "lr": 1.0},
        {"params": [], "lr": 3.0},
    ]
    assert grouped_as_here(saved, [{"a"}, {"c", "b"}, set()]) == saved
    assert grouped_as_here(saved, [{"a", "b", "c"}, set()]) == [
        {"params": ["a", "b", "c"], "lr": 1.0},
        saved[2],
    ]
    for there in (
        [{"a", "b", "c"}],
        [{"a", "b"}, {"c"}],
        [{"a"}, {"b", "c", "d"}],
        [{"a"}, {"b", "c"}],
    ):
        with pytest.raises(ValueError, match=f"3 parameter groups, the optimizer {len(there)}"):
            grouped_as_here(saved, there)
    differ = [{"params": ["a"], "lr": 1.0}, {"params": ["b"], "lr": 2.0}]
    with pytest.raises(ValueError, match="2 parameter groups, the optimizer 1"):
        grouped_as_here(differ, [{"a", "b"}])


def infos_of(widths=(8, 8, 8), outputs=("fp32", "fp32", "fp32")):
    """Three tables: column-wise, table-wise, table-wise."""
    tables = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(10, width, name=f"t{i}", feature_names=[f"f{i}"])
            for i, width in enumerate(widths)
        ]
    )
    sharder = EmbeddingBagCollectionSharder({})
    plan = sharding_plan.construct_module_sharding_plan(
        tables,
        {
            "t0": sharding_plan.column_wise(ranks=[0, 1], compute_kernel="fused"),
            "t1": sharding_plan.table_wise(rank=0, compute_kernel="fused"),
            "t2": sharding_plan.table_wise(rank=1, compute_kernel="fused"),
        },
        sharder,
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    for where, output in zip(plan.values(), outputs, strict=True):
        where.output_dtype = output
    return create_sharding_infos_by_sharding(tables, plan, world_size=2)


def served(codecs=None, **settings):
    together = pooled_infos_served_together(infos_of(**settings), ["t0", "t1", "t2"], codecs)
    return {kind: [info.embedding_config.name for info in own] for kind, own in together.items()}


TOGETHER = {"column_wise": ["t0", "t1", "t2"]}
APART = {"column_wise": ["t0"], "table_wise": ["t1", "t2"]}


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (CommType.FP32, TOGETHER),
        (CommType.BF16, TOGETHER),
        (CommType.FP16, TOGETHER),
        (CommType.INT8, APART),
        (CommType.FP8, APART),
    ],
)
def test_types_stay_apart_where_a_codec_encodes_several_numbers_together(precision, expected):
    assert served(get_qcomm_codecs_registry(QCommsConfig(precision, CommType.FP32))) == expected
    backwards = QCommsConfig(CommType.BF16, precision)
    assert served(get_qcomm_codecs_registry(backwards)) == expected


def test_types_stay_apart_whose_vectors_travel_in_different_dtypes():
    assert served(outputs=["fp16", "fp16", "fp16"]) == TOGETHER
    assert served(outputs=["fp16", "fp32", "fp32"]) == APART
    # Of two table-wise tables with different ones, both travel in the wider.
    assert served(outputs=["fp16", "fp16", "fp32"]) == APART
    assert served(outputs=["fp32", "fp16", "fp32"]) == TOGETHER


def test_types_stay_apart_of_which_one_has_widths_that_fbgemm_does_not_take():
    assert served(widths=[12, 8, 8]) == APART
    assert served(widths=[12, 6, 8]) == TOGETHER
    assert served(widths=[8, 6, 8]) == APART


def test_strategies_are_served_together_where_nothing_is_added_up_between_ranks():
    whole, columns, near = (
        strategy_of(name).sent_as for name in ("table_wise", "column_wise", "table_column_wise")
    )
    assert whole == columns == near
    assert whole is not None
    for name in ("row_wise", "table_row_wise", "grid_shard", "data_parallel"):
        assert strategy_of(name).sent_as is None
